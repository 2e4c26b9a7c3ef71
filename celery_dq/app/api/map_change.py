"""A change of the map of a queue, from the decision to the last tenant that has moved.

It serves a new number of partitions and a new spread of a tenant. Partition 0 decides: as soon as it has the
new map, clients that know the old one are refused, and publish again by the new one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from celery_dq.app.api.audit import OnProgress, ignore_progress
from celery_dq.app.api.broker import (
    BrokerAccess,
    MapChanged,
    follow,
    partitions_of,
    stored_map,
    stored_maps,
)
from celery_dq.app.api.leaders import refuse_singleton
from celery_dq.app.api.tenant_moves import TenantMoves
from celery_dq.app.api.tenant_settings import (
    align_settings,
    copy_settings,
    divide_quotas,
    divide_used_permits,
    remove_former_settings,
)
from celery_dq.errors import CorruptRecord, InvalidRequest, TenantMoving
from celery_dq.inspector.redis_values import Client, check_count, check_seconds, scan, scan_all, text
from celery_dq.options.sections import MAX_PARTITIONS, Options
from celery_dq.shown import shell_word
from celery_dq.transport.message_record import placing_of
from celery_dq.transport.redis.store.move_calls import run_confirmed, set_map
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.partition_map import PartitionMap
from celery_dq.transport.redis.store.rounds import run_one
from celery_dq.transport.redis.store.whole_queue import namesake_of
from celery_dq.transport.resource_set import resources_of


@dataclass(frozen=True)
class PartitionsChange:
    """A change of the number of partitions of a queue.

    Attributes:
        queue: Name of the queue.
        before: Number of partitions before.
        after: Number of partitions now.
        moved: Number of messages that this call has moved to their tenants' new homes.
    """

    queue: str
    before: int
    after: int
    moved: int = 0


def set_partitions(
    broker: BrokerAccess,
    options: Options,
    queue: str,
    count: int,
    timeout_s: float = 60.0,
    on_progress: OnProgress = ignore_progress,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> PartitionsChange:
    """Change the number of partitions of a queue, and move tenants to their new homes.

    Own quotas, pauses, messages and dead letters follow their tenants. Partition 0 decides: as soon as it has
    the new map, clients that know the old one are refused, and publish again by the new one. A second call
    goes on with a change that was interrupted.

    Args:
        broker: Access to the broker.
        options: The app's settings.
        queue: Name of the queue.
        count: The new number.
        timeout_s: Seconds until tasks that run must have ended.
        on_progress: Called with the number of messages that were moved.
        sleep: Waits between two looks.

    Raises:
        InvalidRequest: The number is not from 1 to 4096, the queue is a singleton queue, another queue has
            the name of a partition, another change is under way, or messages wait or run for sets of
            resources.
        TenantMoving: Tasks still run after the time. The same call goes on with the change.
    """
    # The module is a worker's, and most programs with an app do not need it.
    from celery_dq.worker.singleton import singleton_queues

    check_count("partitions", count, most=MAX_PARTITIONS)
    check_seconds("timeout", timeout_s)
    if count > 1 and queue in singleton_queues(broker.app, options):
        raise InvalidRequest(f"{queue!r} is a singleton queue, which has one partition")
    with (
        broker.channel() as channel,
        broker.audit.change(channel.client, "partitions_set", queue) as audited,
    ):
        client = channel.client
        namesake = namesake_of(queue, count, channel.context.registry_key, client) if count > 1 else None
        if namesake is not None:
            raise InvalidRequest(
                f"{namesake!r} is another queue, and would be the name of a partition: empty and delete it "
                f"(celery amqp queue.delete {namesake}), or give one of the two another name"
            )
        (homes,) = stored_maps(channel, [queue], declare=False)
        before = homes.count if homes.before is None else homes.before
        if homes.count != count:
            require_complete(queue, homes)
            widest = max(homes.spreads, key=homes.widest, default="")
            if homes.widest(widest) > count:
                raise InvalidRequest(
                    f"partitions = {count}, but tenant {widest!r} lives in {homes.widest(widest)} of them: "
                    f"run celery dq quotas set {shell_word(queue)} {shell_word(widest)} --spread {count}"
                )
        # The same number may complete the end of an interrupted change, and changes nothing else.
        is_change = homes.count != count or homes.before is not None
        if homes.before is None:
            if count > 1:
                first = partitions_of(channel, queue, homes)[0]
                refuse_singleton(first, client, "which has one partition")
                _check_no_sets(first, client)
            now = homes.begin(count)
            begin_change(partitions_of(channel, queue, now), client, options, homes)
            homes = now
        partitions = partitions_of(channel, queue, homes)
        audited.count, audited.details = int(is_change), f"{before} -> {count}"
        moved = complete_change(partitions, client, options, timeout_s, on_progress, sleep=sleep)
    return PartitionsChange(queue, before, count, moved)


def _check_no_sets(first: Partition, client: Client) -> None:
    found = _some_set(first, client)
    if found is not None:
        raise InvalidRequest(
            f"Messages of {first.keys.queue!r} wait or run for {found!r}, whose resources must be in one "
            "partition: let workers end them, or move them to another queue, and publish no others"
        )


def _some_set(partition: Partition, client: Client) -> str | None:
    """Return a set of resources that has a message in a partition, in whatever state; None without one."""
    keys = partition.keys
    waiting = client.zrange(keys.resource_sets, 0, 0)
    if waiting:
        return text(waiting[0])
    # These may wait later, in a partition where some of their resources have neither quota nor slots.
    held = [keys.held(text(each)) for each in run_one(client, scan_all("zset", keys.leases))]
    places = [scan(client, "zset", key) for key in (keys.delayed, keys.blocked)]
    places += [scan(client, "hash", key) for key in (keys.following, *held)]
    for pairs in chain.from_iterable(places):
        ids = [each for each, _ in pairs]
        for record in client.hmget(keys.messages, ids) if ids else ():
            tenant = _tenant_of(record)
            if resources_of(tenant) is not None:
                return tenant
    return None


def _tenant_of(record: bytes | None) -> str:
    try:
        return placing_of(record, "")[0] if record else ""
    except CorruptRecord:
        return ""  # of a settled message, or one of which a worker makes a dead letter


#: Seconds between two looks for tenants whose running tasks have ended.
LOOK_EVERY_S = 0.05


def require_complete(queue: str, homes: PartitionMap) -> None:
    """Refuse a change while another one is under way.

    Raises:
        InvalidRequest: The map says that tenants move.
    """
    if homes.before is not None:
        change = f"to {homes.count} partitions"
        if homes.respread:
            change = f"of the spread of tenant {homes.respread}"
        raise InvalidRequest(
            f"A change of {queue!r} {change} is not complete. Complete it first: "
            f"celery dq partitions {shell_word(queue)} --set {homes.count}"
        )


def begin_change(
    partitions: Sequence[Partition], client: Client, options: Options, before: PartitionMap
) -> None:
    """Decide for the map of these partitions.

    Args:
        partitions: All partitions that the queue has before or after the change, with the map of the change.
        client: A redis client.
        options: The app's settings.
        before: The map that the queue has.

    Raises:
        MapChanged: The queue has got another map meanwhile.
    """
    # The quotas are in the future homes before the first message.
    copy_settings(partitions, client)
    _decide(partitions[0], client, options, before, partitions[0].homes)


def complete_change(
    partitions: Sequence[Partition],
    client: Client,
    options: Options,
    timeout_s: float,
    on_progress: OnProgress = ignore_progress,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Move tenants until all of them live in their new homes. A second call goes on after an interruption.

    The first pass over the tenants moves all that can move at once, however long that takes. Several
    processes may complete one change: when the first one has ended it, the others return.

    Args:
        partitions: All partitions that the queue has before or after the change, with the map of the change.
        client: A redis client.
        options: The app's settings.
        timeout_s: Seconds until tasks that run must have ended.
        on_progress: Called with the number of messages that were moved.
        sleep: Waits between two passes.

    Returns:
        The number of messages that this process has moved.

    Raises:
        MapChanged: A later change has begun.
        TenantMoving: Tasks still run, or messages with dedup keys wait, after the time.
    """
    first, homes = partitions[0], partitions[0].homes
    moves, ended = TenantMoves(client, partitions, options, on_progress), homes.end()
    try:
        _move_all(moves, partitions, client, timeout_s, sleep)
        divide_used_permits(partitions, client)
        divide_quotas(partitions, homes.spreads, client)
        _decide(first, client, options, homes, ended)
    except MapChanged:
        # Another process that has ended the change may be killed before the rest.
        if stored_map(first, client) != ended:
            raise
    partitions_now = [Partition(each.keys, each.scripts, ended) for each in partitions]
    follow(partitions_now, client)
    # Another mover may have taken something out meanwhile, and cannot any more.
    TenantMoves(client, partitions_now, options).deliver_outboxes()
    # A share that was set by the map of the change, after the division, is that of the higher spread.
    divide_quotas(partitions_now, homes.spreads, client)
    remove_former_settings(partitions_now, client)
    return moves.moved


def _move_all(
    moves: TenantMoves,
    partitions: Sequence[Partition],
    client: Client,
    timeout_s: float,
    sleep: Callable[[float], None],
) -> None:
    ends_at = time.monotonic() + timeout_s
    # From here on, a quota by the map before is refused. One may have been set after the first copy, and a
    # new spread divides it.
    follow(partitions, client)
    align_settings(partitions, client)
    while (moving := moves.step()) or not moves.end():
        if time.monotonic() >= ends_at:
            raise _incomplete(partitions[0].keys.queue, partitions[0].homes, timeout_s, moves, moving)
        sleep(LOOK_EVERY_S)


def _incomplete(
    queue: str, homes: PartitionMap, timeout_s: float, moves: TenantMoves, left: int
) -> TenantMoving:
    tenants = (
        f"tenant {homes.respread} of {queue!r} still runs" if homes.respread else f"tenants of {queue!r} run"
    )
    return TenantMoving(
        f"after timeout = {timeout_s:g} s, {tenants} tasks or have messages with dedup keys in former homes, "
        f"and the new ones wait (tenants: {left}, moved messages: {moves.moved}): run the same again, or "
        f"celery dq partitions {shell_word(queue)} --set {homes.count}"
    )


def _decide(
    first: Partition, client: Client, options: Options, before: PartitionMap, now: PartitionMap
) -> None:
    # No partition may know a map that a failover takes away from the one that decides.
    stored = run_confirmed(set_map(first, before, now), first, client, options.confirm_replicas)
    if stored != now or stored.spreads != now.spreads:
        raise MapChanged.of(first.keys.queue)
