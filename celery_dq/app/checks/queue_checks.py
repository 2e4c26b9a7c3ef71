"""The checks of ``celery dq doctor`` of queues that contradict the settings, or have several partitions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from celery_dq.app.api.api import DQ, dq_of
from celery_dq.app.api.broker import BrokerAccess, OpenQueue
from celery_dq.app.checks.finding import Finding
from celery_dq.duration import format_duration
from celery_dq.inspector.queues import QueueSnapshot, queue_snapshot
from celery_dq.inspector.redis_values import command, number, scan_all, text
from celery_dq.keys import CONFIG_QUOTA, DEFAULT_QUOTA
from celery_dq.shown import shell_word, shown_name
from celery_dq.transport.redis.store.cluster_client import node_serving
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.rounds import Rounds, run_rounds
from celery_dq.worker.singleton import singleton_queues
from celery_dq.worker.start_checks import queues_of_settings, routed_queues

#: Queues that the finding names.
_MOST_NAMED = 10


def _more(found: Sequence[object]) -> str:
    """Return the end of a list of the first names."""
    return f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""


def unused_queues(app: Any, channel: Any) -> Iterator[Finding]:
    """Whether the broker has queues that never had a message, and that no setting names."""
    dq = dq_of(app)
    named = queues_of_settings(app, dq.options)
    known = [*dq.queues]
    unused = _unused(dq, [name for name in known if name not in named])
    if not unused:
        return
    others = [name for name in known if name not in {each.name for each in unused}]
    listed = ", ".join(_described(each, others) for each in unused[:_MOST_NAMED])
    more = _more(unused)
    yield Finding(
        "W026",
        f"These queues never had a message, and no setting names them: {listed}{more}. A typo in -Q makes "
        "such a queue.",
        f"Remove them: celery dq queues {shell_word(unused[0].name)} --forget. Or name them in task_queues "
        "or dq_queues.",
    )


def unrouted_quotas(app: Any, channel: Any) -> Iterator[Finding]:
    """Whether a queue has quotas, and neither a message so far nor a task whose calls go there."""
    tasks = [task for name, task in app.tasks.items() if not name.startswith("celery.")]
    if not tasks:
        return  # a program that only calls tasks by their names
    dq = dq_of(app)
    limited = {each.name for each in dq.options.queues if each.names_quota}
    routed = routed_queues(app) | {name for task in tasks for name in _queue_of(app, task)}
    found = _unused(dq, sorted({*dq.queues, *limited} - routed))
    names = _with_quotas(app, [each.name for each in found], limited)
    if names:
        listed = ", ".join(map(repr, names[:_MOST_NAMED]))
        more = _more(names)
        yield Finding(
            "W035",
            f"These queues have quotas, never had a message, and no task is routed to them: {listed}{more}. "
            "Their quotas limit nothing.",
            f"Route the tasks that they are for: task_routes = {{'<task>': {names[0]!r}}}. Or name the queue "
            "in the calls.",
        )


def _queue_of(app: Any, task: Any) -> Iterator[str]:
    """Yield the queue of a call without arguments. A route may be a function, which may fail for that."""
    with suppress(Exception):
        yield app.amqp.router.route({}, task.name, (), {}, task)["queue"].name


def _with_quotas(app: Any, names: list[str], limited: set[str]) -> list[str]:
    """Return those of some queues that have a quota in the settings, or stored in the broker."""
    others = [name for name in names if name not in limited]
    stored = set[str]()
    if others:
        with BrokerAccess(app, dq_of(app).context).open_all(others) as queues:
            partitions = [each for queue in queues for each in queue.partitions]
            counts = run_rounds(queues[0].client, [command("hlen", each.keys.quotas) for each in partitions])
        stored = {each.keys.queue for each, count in zip(partitions, counts, strict=True) if count}
    return [name for name in names if name in limited or name in stored]


def _unused(dq: DQ, names: list[str]) -> list[Any]:
    """Return the snapshots of those queues that never had a message."""
    snapshots = dq.queues.snapshots(*names, ages=False) if names else ()
    return [
        each for each in snapshots if isinstance(each, QueueSnapshot) and not each.counters.pushed + each.dead
    ]


def former_singleton_queues(app: Any, channel: Any) -> Iterator[Finding]:
    """Whether the broker has singleton queues that no setting names; ordinary workers get nothing of them."""
    dq = dq_of(app)
    expected = singleton_queues(app, dq.options)
    names = [name for name in dq.queues if name not in expected]
    pipeline = channel.client.pipeline(transaction=False)
    for name in names:
        pipeline.hget(channel.partition(name).keys.state, "epoch")
    epochs = pipeline.execute()
    found = [name for name, epoch in zip(names, epochs, strict=True) if number(epoch)]
    if found:
        more = _more(found)
        yield Finding(
            "W036",
            "These queues are singleton queues in the broker, but not in the settings: "
            f"{', '.join(map(repr, found[:_MOST_NAMED]))}{more}. Ordinary workers get no messages of them.",
            f"Make them ordinary queues: celery dq leaders {shell_word(found[0])} --forget. "
            "Or name them in dq_singleton_queues.",
        )


def _described(queue: Any, others: list[str]) -> str:
    notes = []
    if queue.living_consumers:
        notes.append("a worker consumes it")
    close = get_close_matches(queue.name, others, 1)
    if close:
        notes.append(f"did you mean {close[0]!r}?")
    return f"{queue.name!r} ({'; '.join(notes)})" if notes else repr(queue.name)


def partitions(app: Any, channel: Any) -> Iterator[Finding]:
    """Whether the partitions of each queue agree with the settings and with each other, and are consumed."""
    broker = BrokerAccess(app, dq_of(app).context)
    names = broker.queue_names()
    with broker.open_all(names) as queues:
        for name, queue in zip(names, queues, strict=True):
            count, wanted = queue.homes.count, broker.options.queue(name).partitions
            if wanted not in (1, count) and _is_declared(queue):
                yield Finding(
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
    for name, keys, epoch, set_aside in found:
        if set_aside:
            listed = ", ".join(sorted(shown_name(text(each)) for each in set_aside)[:_MOST_NAMED])
            yield Finding(
                "W038",
                f"{len(set_aside)} fields of queue {name!r} could not be read, because another "
                f"program has written them, and were set aside: {listed}. A message of each tenant "
                "behind 'waiting|' does not run.",
                "Keep other programs from its keys, and make dead letters of such messages, which can be "
                f"replayed: celery dq dead recover {shell_word(name)}.",
            )
        if epoch is not None and not _is_number(epoch):
            yield Finding(
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
            "W023",
            f"A change of queue {name!r} {change} is not complete: "
            "some tenants may wait for the end of their moves.",
            f"Complete it: celery dq partitions {shell_word(name)} --set {homes.count}.",
        )
    elif odd:
        yield Finding(
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
            "W024",
            f"The pause of queue {name!r} differs between its partitions: {_named(name, odd)} have not that "
            f"of {name}/0.",
            f"Pause it again: celery dq pause {shell_word(name)}; or end the pause: celery dq resume "
            f"{shell_word(name)}.",
        )


def _unconsumed(name: str, found: Sequence[QueueSnapshot], lease_us: int) -> Iterator[Finding]:
    # A worker that reconnects, as after a failover, may be late by less than a lease.
    consumed = [any(consumer.lease_s > -lease_us / 1e6 for consumer in each.workers) for each in found]
    left = [
        number
        for number, (each, is_consumed) in enumerate(zip(found, consumed, strict=True))
        if each.waiting + each.delayed + each.discards and not is_consumed
    ]
    if left and any(consumed):
        yield Finding(
            "W025",
            f"Messages wait in {_named(name, left)}, where no worker has a lease, while other partitions of "
            "the queue are consumed.",
            "After a failover, workers come back by themselves. If none has after "
            f"{format_duration(lease_us)} (dq_lease), start one with -Q {name} or -Q {name}/{left[0]}.",
        )


def _named(name: str, numbers: Sequence[int]) -> str:
    """Return the names of partitions, as far as they fit a sentence."""
    listed = ", ".join(f"{name}/{number}" for number in numbers[:_MOST_NAMED])
    return listed + _more(numbers)


def nodes(app: Any, channel: Any) -> Iterator[Finding]:
    """Report how many partitions of the queues each node of a cluster serves."""
    if channel.identity.slots is None:
        return
    counts = dict.fromkeys(map(str, channel.identity.slots.masters), 0)
    names = BrokerAccess(app, dq_of(app).context).queue_names()
    for name in names:
        for partition in channel.partitions(name):
            node = node_serving(channel.client, partition.keys.slot)
            counts[node] = counts.get(node, 0) + 1
    spread = ", ".join(f"{node or 'no node'} {count}" for node, count in counts.items())
    missing = counts.get("", 0)
    yield Finding(
        "E032" if missing else "I032",
        f"Partitions of all queues by node: {spread}.",
        "Let a master serve each slot: redis-cli --cluster check." if missing else "",
    )
