"""A change of the map of a queue, from the decision to the last tenant that has moved.

It serves a new number of partitions and a new spread of a tenant. Partition 0 decides: as soon as it has the
new map, clients that know the old one are refused, and publish again by the new one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from celery_dq.app.api.broker import MapChanged, follow
from celery_dq.app.api.progress import OnProgress, ignore_progress
from celery_dq.app.api.tenant_moves import TenantMoves
from celery_dq.app.api.tenant_settings import (
    align_settings,
    copy_settings,
    divide_quotas,
    divide_used_permits,
    remove_former_settings,
)
from celery_dq.errors import InvalidRequest, TenantMoving
from celery_dq.inspector.redis_values import Client
from celery_dq.options.sections import Options
from celery_dq.shown import shell_word
from celery_dq.transport.redis.store.move_calls import run_confirmed, set_map
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.partition_map import PartitionMap

__all__ = ["begin_change", "complete_change", "require_complete"]

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

    The first pass over the tenants moves all that can move at once, however long that takes.

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
        TenantMoving: Tasks still run, or messages with dedup keys wait, after the time.
    """
    ends_at = time.monotonic() + timeout_s
    homes = partitions[0].homes
    # From here on, a quota by the map before is refused. One may have been set after the first copy, and a
    # new spread divides it.
    follow(partitions, client)
    align_settings(partitions, client)
    moves = TenantMoves(client, partitions, options, on_progress)
    while (moving := moves.step()) or not moves.end():
        if time.monotonic() >= ends_at:
            raise _incomplete(partitions[0].keys.queue, homes, timeout_s, moves, moving)
        sleep(LOOK_EVERY_S)
    divide_used_permits(partitions, client)
    divide_quotas(partitions, client)
    ended = _decide(partitions[0], client, options, homes, homes.end())
    partitions_now = [Partition(each.keys, each.scripts, ended) for each in partitions]
    follow(partitions_now, client)
    # Another mover may have taken something out meanwhile, and cannot any more.
    TenantMoves(client, partitions_now, options).deliver_outboxes()
    # A share that was set by the map of the change, after the division, is that of the higher spread.
    divide_quotas(partitions, client)
    remove_former_settings(partitions, client)
    return moves.moved


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
) -> PartitionMap:
    # No partition may know a map that a failover takes away from the one that decides.
    stored = run_confirmed(set_map(first, before, now), first, client, options.confirm_replicas)
    if stored != now:
        raise MapChanged.of(first.keys.queue)
    return now
