"""The checks of ``celery dq doctor`` of queues with several partitions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import redis

from celery_dq.app.api.api import dq_of
from celery_dq.app.api.broker import BrokerAccess, OpenQueue
from celery_dq.app.checks.finding import Finding
from celery_dq.duration import format_duration
from celery_dq.inspector.queues import QueueSnapshot, queue_snapshot
from celery_dq.inspector.redis_values import scan_all, text
from celery_dq.keys import CONFIG_QUOTA, DEFAULT_QUOTA
from celery_dq.shown import shell_word, shown_name
from celery_dq.transport.redis.store.cluster_client import node_serving
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.rounds import Rounds, run_rounds
from celery_dq.transport.redis.store.server_errors import BrokerRefused

__all__ = ["nodes", "partitions", "unreadable_fields"]

#: Partitions that a finding names.
_MOST_NAMED = 10


def partitions(app: Any, channel: Any) -> Iterator[Finding]:
    """Whether the partitions of each queue agree with the settings and with each other, and are consumed."""
    broker = BrokerAccess(app, dq_of(app).context)
    try:
        names = broker.queue_names()
    except (redis.exceptions.NoPermissionError, BrokerRefused):
        return  # the check of the rights reports it
    with broker.open_all(names) as queues:
        for name, queue in zip(names, queues, strict=True):
            count, wanted = queue.homes.count, broker.options.queue(name).partitions
            if wanted not in (1, count) and _is_declared(queue):
                yield Finding(
                    "warning",
                    "W022",
                    f"dq_queues[{name!r}]['partitions'] is {wanted}, and the broker has {count} partitions "
                    f"of queue {name!r}, which all clients use.",
                    f"Set dq_queues[{name!r}]['partitions'] = {count} in the settings. If the queue is to "
                    f"have {wanted}, run celery dq partitions {shell_word(name)} --set {wanted}.",
                )
            if queue.homes.total > 1:
                found = queue_snapshot(queue.partitions, queue.client, ages=False).partitions
                yield from _differences(name, queue)
                yield from _paused_in_part(name, found)
                yield from _unconsumed(name, found, broker.options.lease_us)


def unreadable_fields(app: Any, channel: Any) -> Iterator[Finding]:
    """Whether something else has written to the keys of a queue, so that scripts could not read a field."""
    broker = BrokerAccess(app, dq_of(app).context)
    try:
        names = broker.queue_names()
        with broker.open_all(names) as queues:
            every = [
                (name, partition)
                for name, queue in zip(names, queues, strict=True)
                for partition in queue.partitions
            ]
            read = [_unreadable_in(partition) for _, partition in every]
            fields = run_rounds(channel.client, read)
            found = [(name, each.keys, *own) for (name, each), own in zip(every, fields, strict=True)]
    except (redis.exceptions.NoPermissionError, BrokerRefused):
        return  # the check of the rights reports it
    for name, keys, epoch, set_aside in found:
        if set_aside:
            listed = ", ".join(sorted(shown_name(text(each)) for each in set_aside)[:_MOST_NAMED])
            yield Finding(
                "warning",
                "W038",
                f"{len(set_aside)} fields of queue {name!r} could not be read, because another "
                f"program has written them, and were set aside: {listed}. A message of each tenant "
                "behind 'waiting|' does not run.",
                "Keep other programs from its keys, and make dead letters of such messages, which can be "
                f"replayed: celery dq dead recover {shell_word(name)}.",
            )
        if epoch is not None and not _is_number(epoch):
            yield Finding(
                "error",
                "E039",
                f"The fencing token of queue {name!r} is {shown_name(text(epoch))!r}, which is not a number, "
                "so its messages do not run.",
                f"Stop its workers, run redis-cli HDEL {shell_word(keys.state)} epoch, and start them again.",
            )


def _unreadable_in(partition: Partition) -> Rounds[tuple[bytes | None, dict[bytes, Any]]]:
    (epoch,) = yield lambda pipe: pipe.hget(partition.keys.state, "epoch")
    set_aside = yield from scan_all("hash", partition.keys.unreadable)
    return epoch, set_aside


def _is_number(value: bytes) -> bool:
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False


def _is_declared(queue: OpenQueue) -> bool:
    return bool(queue.client.exists(queue.partitions[0].keys.state))


def _differences(name: str, queue: OpenQueue) -> Iterator[Finding]:
    stored = run_rounds(queue.client, [_settings_in(each) for each in queue.partitions])
    homes, maps = queue.homes, [text(each[0] or b"1") for each in stored]
    odd = [place for place, each in enumerate(maps) if each != maps[0]]
    if homes.before is not None:
        change = f"from {homes.before} to {homes.count} partitions"
        if homes.respread:
            change = f"of the spread of tenant {homes.respread}"
        yield Finding(
            "warning",
            "W023",
            f"A change of queue {name!r} {change} is not complete: "
            "some tenants may wait for the end of their moves.",
            f"Complete it: celery dq partitions {shell_word(name)} --set {homes.count}.",
        )
    elif odd:
        yield Finding(
            "warning",
            "W023",
            f"A change of the number of partitions of queue {name!r} was interrupted: {_named(name, odd)} do "
            f"not know that it has {homes.count}.",
            f"Complete it: celery dq partitions {shell_word(name)} --set {homes.count}.",
        )
    word = shell_word(name)
    for place, what, remedy in (
        (1, "default quota that was set live", f"Set it again: celery dq quotas set {word} --rate …."),
        (2, "quota of the settings", f"Apply it again: celery dq quotas apply {word}."),
    ):
        odd = [number for number, each in enumerate(stored) if each[place] != stored[0][place]]
        if odd:
            yield Finding(
                "warning",
                "W024",
                f"The {what} of queue {name!r} differs between its partitions: {_named(name, odd)} have not "
                f"that of {name}/0.",
                remedy,
            )


def _settings_in(partition: Partition) -> Rounds[tuple[bytes | None, bytes | None, bytes | None]]:
    """Return the number of partitions, the live default and the quota of the settings, as stored."""
    keys = partition.keys

    def read(pipe: Any) -> None:
        pipe.hmget(keys.state, "partitions")
        pipe.hmget(keys.quotas, DEFAULT_QUOTA, CONFIG_QUOTA)

    (count,), (default, config) = yield read
    return count, default, config


def _paused_in_part(name: str, found: Sequence[QueueSnapshot]) -> Iterator[Finding]:
    ends = [(each.pause is not None, each.pause and each.pause.until) for each in found]
    odd = [number for number, end in enumerate(ends) if end != ends[0]]
    if odd:
        yield Finding(
            "warning",
            "W024",
            f"The pause of queue {name!r} differs between its partitions: {_named(name, odd)} have not that "
            f"of {name}/0.",
            f"Pause it again: celery dq pause {shell_word(name)}; or end the pause: celery dq resume "
            f"{shell_word(name)}.",
        )


def _unconsumed(name: str, found: Sequence[QueueSnapshot], lease_us: int) -> Iterator[Finding]:
    # A worker that reconnects, as after a failover, may be late by less than a lease.
    consumed = [any(consumer.lease_s > -lease_us / 1e6 for consumer in each.consumers) for each in found]
    left = [
        number
        for number, (each, is_consumed) in enumerate(zip(found, consumed, strict=True))
        if each.waiting + each.delayed + each.discards and not is_consumed
    ]
    if left and any(consumed):
        yield Finding(
            "warning",
            "W025",
            f"Messages wait in {_named(name, left)}, where no worker has a lease, while other partitions of "
            "the queue are consumed.",
            "After a failover, workers come back by themselves. If none has after "
            f"{format_duration(lease_us)} (dq_lease), start one with -Q {name} or -Q {name}/{left[0]}.",
        )


def _named(name: str, numbers: Sequence[int]) -> str:
    """Return the names of partitions, as far as they fit a sentence."""
    listed = ", ".join(f"{name}/{number}" for number in numbers[:_MOST_NAMED])
    rest = len(numbers) - _MOST_NAMED
    return f"{listed} and {rest} more" if rest > 0 else listed


def nodes(app: Any, channel: Any) -> Iterator[Finding]:
    """Report how many partitions of the queues each node of a cluster serves."""
    if channel.identity.slots is None:
        return
    counts = dict.fromkeys(map(str, channel.identity.slots.masters), 0)
    try:
        names = BrokerAccess(app, dq_of(app).context).queue_names()
    except (redis.exceptions.NoPermissionError, BrokerRefused):
        return  # the check of the rights reports it
    for name in names:
        for partition in channel.partitions(name):
            node = node_serving(channel.client, partition.keys.slot)
            counts[node] = counts.get(node, 0) + 1
    spread = ", ".join(f"{node or 'no node'} {count}" for node, count in counts.items())
    missing = counts.get("", 0)
    yield Finding(
        "error" if missing else "ok",
        "E032" if missing else "I032",
        f"Partitions of all queues by node: {spread}.",
        "Let a master serve each slot: redis-cli --cluster check." if missing else "",
    )
