"""Snapshots of queues and their consumers, and of pauses of tenants and whole queues."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import reduce
from itertools import islice
from operator import add, methodcaller
from typing import Any, Literal

from celery_dq.inspector.queue_counters import COUNTER_FIELDS, PLACES, QueueCounters, oldest_waiting_s
from celery_dq.inspector.redis_values import Client, chunks, moment, number, scan_all, server_time_us, text
from celery_dq.transport.partition_replies import PauseCause
from celery_dq.transport.redis.store.cluster_client import node_serving
from celery_dq.transport.redis.store.partition import Partition, process_of
from celery_dq.transport.redis.store.rounds import Atomic, Rounds, run_rounds, together

#: The fields of the hash ``state`` that :func:`pause_of` reads.
PAUSE_FIELDS = ("paused_since", "paused_until")
#: The end of a pause that does not end by itself, µs; ``include/wake.lua`` has the same.
WITHOUT_END_US = 9e15


@dataclass(frozen=True)
class Pause:
    """A pause of a tenant or of a whole queue.

    Attributes:
        since: When it began.
        until: When it ends by itself; None when only a call ends it.
        cause: The task that has paused the tenant by ``Throttled``; None for a pause by a call.
    """

    since: datetime | None
    until: datetime | None = None
    cause: PauseCause | None = None

    def __str__(self) -> str:
        """Return a phrase for a table: its end and its cause, or without an end its begin."""
        if self.until is not None:
            cause = "" if self.cause is None else f", because {self.cause}"
            return f"until {self.until.isoformat(timespec='seconds')}{cause}"
        return "without end" if self.since is None else f"since {self.since.isoformat(timespec='seconds')}"


def pause_of(since_us: float, until_us: float, now_us: float, cause: bytes | None = None) -> Pause | None:
    """Return a pause from its times in µs; None when it is over. An end of 0 or `WITHOUT_END_US` is none."""
    if 0 < until_us <= now_us:
        return None
    until = None if until_us >= WITHOUT_END_US else moment(until_us)
    return Pause(moment(since_us), until, PauseCause.unpack(cause))


def pause_of_all(pauses: Sequence[Pause | None]) -> Pause | None:
    """Return when all partitions of a queue are paused, from their pauses; None when one of them is not."""
    known = [each for each in pauses if each is not None]
    since = [each.since for each in known if each.since is not None]
    until = [each.until for each in known if each.until is not None]
    return Pause(max(since, default=None), min(until, default=None)) if len(known) == len(pauses) else None


def queue_pause(partition: Partition, client: Client) -> Pause | None:
    """Return the pause of the whole queue in a partition; None when it is not paused."""
    return read_queue_pause(client.hmget(partition.keys.state, PAUSE_FIELDS), server_time_us(client))


def read_queue_pause(fields: list[Any], now_us: float) -> Pause | None:
    """Return the pause of a queue from the values of `PAUSE_FIELDS`."""
    since, until = (number(each) for each in fields)
    return pause_of(since, until, now_us) if until else None


def fencing_token(partition: Partition, client: Client) -> int:
    """Return the fencing token in force of a singleton queue; 0 of an ordinary queue."""
    return int(number(client.hget(partition.keys.state, "epoch")))


def paused_tenants(partitions: Sequence[Partition], client: Client) -> dict[str, Pause]:
    """Return the tenants that were paused by a call, the earliest pause first. Read in chunks."""
    now, homes = server_time_us(client), partitions[0].homes
    stored = zip(partitions, run_rounds(client, [_pauses_in(each) for each in partitions]), strict=True)
    found = [
        row for partition, rows in stored for row in rows if homes.concerns(partition.keys.partition, row[1])
    ]
    found.sort(key=lambda row: row[:2])
    pauses = {name: pause_of(since, until, now, cause) for since, name, until, cause in found}
    return {name: pause for name, pause in pauses.items() if pause is not None}


def _pauses_in(partition: Partition) -> Rounds[list[tuple[float, str, float, bytes | None]]]:
    """Return begin (µs), tenant, end (µs, 0 for none) and cause of the pauses of tenants."""
    since = yield from scan_all("zset", partition.keys.pauses)
    found = []
    for names in chunks(list(since)):
        ends, causes = yield together(
            methodcaller("zmscore", partition.keys.pause_ends, names),
            methodcaller("hmget", partition.keys.pause_causes, names),
        )
        found += [
            (since[name], text(name), end or 0, cause)
            for name, end, cause in zip(names, ends, causes, strict=True)
        ]
    return found


#: The state of a queue in one word.
Health = Literal["active", "idle", "no-worker", "throttled", "at-concurrency", "paused"]

#: The counts of tenants, in the order of :data:`~celery_dq.inspector.queue_counters.PLACES`.
_TENANTS = ("eligible", "resource_sets", "throttled", "at_concurrency", "paused")
_COUNTS = ("waiting", "delayed", "held", "discards", "dead", *_TENANTS)


#: How the names of consumers begin that bring messages elsewhere, and run none.
MOVE, MIGRATION = "move:", "migration:"


def is_worker(consumer: str) -> bool:
    """Return whether a consumer runs messages. A move, or a migration back, only takes them."""
    return not consumer.startswith((MOVE, MIGRATION))


@dataclass(frozen=True)
class ConsumerSnapshot:
    """A process that consumes a queue, or a move or migration that takes messages from it.

    Attributes:
        name: Name of the worker (of another consumer, its host), process id and a random part.
        lease_s: Seconds until its lease expires; negative after that, until another worker reaps it.
        held: Number of its in-flight messages.
    """

    name: str
    lease_s: float
    held: int

    @property
    def worker(self) -> str:
        """Celery's name of the worker; of another consumer, its host."""
        return _UNIQUE.sub("", self.name)

    @property
    def is_alive(self) -> bool:
        """Whether its lease has not expired."""
        return self.lease_s > 0


#: The end of a consumer's name that differs between the processes of one worker.
_UNIQUE = re.compile(r":\d+:[0-9a-f]{12}\Z")


def merged(consumers: Iterable[ConsumerSnapshot]) -> tuple[ConsumerSnapshot, ...]:
    """Return each process once, with its longest lease, the shortest ones first."""
    found: dict[str, ConsumerSnapshot] = {}
    for each in consumers:
        known = found.get(each.name, each)
        held = each.held if known is each else known.held + each.held
        found[each.name] = ConsumerSnapshot(each.name, max(known.lease_s, each.lease_s), held)
    return tuple(sorted(found.values(), key=lambda each: each.lease_s))


@dataclass(frozen=True)
class QueueSnapshot:
    """The counts of a queue.

    Attributes:
        name: Name of the queue.
        waiting: Messages that wait for their turn, whether or not their tenant may be served now.
        delayed: Messages whose ETA has not come.
        held: In-flight messages.
        discards: Messages that will not run and wait for Celery's bookkeeping.
        dead: Dead letters.
        eligible: Tenants that may be served now. A resource counts with the messages of its sets.
        resource_sets: Sets of resources with a backlog.
        throttled: Tenants with a backlog that wait for their rate.
        limited: Tenants with a backlog that wait for their concurrency.
        paused: Tenants with a backlog that are paused.
        consumers: The processes that consume the queue, and moves and migrations that hold messages.
        counters: The numbers of messages that the broker has handled since the first one.
        oldest_waiting_s: How long its oldest waiting message has waited, in seconds; None without one.
            Delayed messages and those that wait for a dedup lock do not count. It is read after the counts,
            so a message that was counted may have been claimed in between. With more than 4,000 tenants it
            is that of the next 4,000 in turn; a tenant that moves during the call may be missed. With
            aging priorities another message may have waited longer, by at most nine steps.
        pause: The pause of the whole queue; None when it is not paused. Of a queue with several partitions,
            the time in which all of them are paused.
        worker: The worker that serves the partition by the allocation, where ``celery dq partitions`` shows
            it; "" otherwise.
        partitions: The same of each partition, by number, named ``push/0`` and so on; () for a queue with
            one partition. All other attributes are of the whole queue: sums, and of a consumer the longest
            lease.
        slot: Hash slot of the partition on a Redis Cluster; None elsewhere, and of several partitions.
        node: The master that serves the slot, as ``host:port``; "" without a slot.
    """

    name: str
    waiting: int
    delayed: int
    held: int
    discards: int
    dead: int
    eligible: int
    resource_sets: int
    throttled: int
    at_concurrency: int
    paused: int
    consumers: tuple[ConsumerSnapshot, ...]
    counters: QueueCounters
    oldest_waiting_s: float | None
    pause: Pause | None = None
    worker: str = ""
    partitions: tuple[QueueSnapshot, ...] = ()
    slot: int | None = None
    node: str = ""

    @property
    def tenants(self) -> int:
        """Number of tenants with a backlog, without the sets of resources."""
        return self.eligible + self.throttled + self.at_concurrency + self.paused

    @property
    def workers(self) -> tuple[ConsumerSnapshot, ...]:
        """The consumers without moves and migrations."""
        return tuple(each for each in self.consumers if is_worker(each.name))

    @property
    def living_consumers(self) -> int:
        """Number of workers whose lease has not expired."""
        return sum(each.is_alive for each in self.workers)

    @property
    def is_paused(self) -> bool:
        """Whether the whole queue is paused."""
        return self.pause is not None

    @property
    def health(self) -> Health:
        """The state in one word; of a queue that waits for its tenants, the most common reason of these."""
        if self.is_paused:
            return "paused"
        if not self.living_consumers and (self.waiting or self.delayed or self.discards):
            return "no-worker"
        if self.waiting and not self.eligible:
            reasons: dict[Health, int] = {
                "throttled": self.throttled,
                "at-concurrency": self.at_concurrency,
                "paused": self.paused,
            }
            reason = max(reasons, key=lambda each: reasons[each])
            if reasons[reason]:
                return reason
        return "active" if self.waiting or self.held else "idle"


@dataclass(frozen=True)
class ZooKeeperQueueSnapshot:
    """The counts of a queue on ``dq-zookeeper://``. Which workers consume it is not known there.

    Attributes:
        name: Name of the queue.
        waiting: Messages that wait.
        delayed: Messages whose ETA has not come, or that no worker has made ready yet.
        held: In-flight messages.
        dead: Dead letters.
        suspects: Messages that have lost a worker.
        unreadable: Messages that no worker can read.
    """

    name: str
    waiting: int
    delayed: int
    held: int
    dead: int
    suspects: int
    unreadable: int

    @property
    def health(self) -> Health:
        """The state in one word."""
        return "active" if self.waiting or self.held else "idle"


def queue_snapshot(partitions: Sequence[Partition], client: Client, *, ages: bool = True) -> QueueSnapshot:
    """Read the counts of a queue; see :func:`queue_snapshots`."""
    (found,) = queue_snapshots([partitions], client, ages=ages)
    return found


def queue_snapshots(
    queues: Sequence[Sequence[Partition]], client: Client, *, ages: bool = True
) -> list[QueueSnapshot]:
    """Read the counts of queues, in two round trips per 64 partitions with one command per consumer.

    Args:
        queues: The partitions of each queue.
        client: The client.
        ages: Whether to look for the oldest waiting message of each queue that has one, with one further
            round trip per 100 tenants.
    """
    counted = iter(run_rounds(client, [_counted(each) for partitions in queues for each in partitions]))
    snapshots = []
    for partitions in queues:
        found = list(islice(counted, len(partitions)))
        if partitions[0].keys.on_cluster:
            found = _with_nodes(partitions, client, found)
        if ages:
            found = _with_ages(partitions, client, found)
        snapshots.append(found[0] if len(found) == 1 else _whole(partitions[0].keys.queue, found))
    return snapshots


def _with_nodes(
    partitions: Sequence[Partition], client: Client, found: Sequence[QueueSnapshot]
) -> list[QueueSnapshot]:
    slots = [partition.keys.slot for partition in partitions]
    return [
        replace(each, slot=slot, node=node_serving(client, slot))
        for each, slot in zip(found, slots, strict=True)
    ]


def _with_ages(
    partitions: Sequence[Partition], client: Client, found: Sequence[QueueSnapshot]
) -> list[QueueSnapshot]:
    # Only these places have tenants.
    places = [
        [place for place, name in zip(PLACES, _TENANTS, strict=True) if getattr(each, name)] for each in found
    ]
    waits = oldest_waiting_s(partitions, client, places)
    return [replace(each, oldest_waiting_s=wait) for each, wait in zip(found, waits, strict=True)]


def _whole(name: str, partitions: Sequence[QueueSnapshot]) -> QueueSnapshot:
    """Return the snapshot of a queue with several partitions."""
    waits = [each.oldest_waiting_s for each in partitions if each.oldest_waiting_s is not None]
    return QueueSnapshot(
        name=name,
        **{count: sum(getattr(each, count) for each in partitions) for count in _COUNTS},
        consumers=merged(consumer for each in partitions for consumer in each.consumers),
        counters=reduce(add, (each.counters for each in partitions)),
        oldest_waiting_s=max(waits, default=None),
        pause=pause_of_all([each.pause for each in partitions]),
        partitions=tuple(replace(each, name=f"{name}/{number}") for number, each in enumerate(partitions)),
    )


def _counted(partition: Partition) -> Rounds[QueueSnapshot]:
    """Read the counts of one partition."""
    keys = partition.keys
    (leases,) = yield lambda pipe: pipe.zrange(keys.leases, 0, -1, withscores=True)
    deadlines = [(text(name), score) for name, score in leases]

    def read(pipe: Any) -> None:
        pipe.hlen(keys.messages)
        for key in (keys.delayed, keys.discards, *(getattr(keys, place) for place in PLACES)):
            pipe.zcard(key)
        pipe.hlen(keys.dead)
        pipe.hmget(keys.state, COUNTER_FIELDS)
        pipe.hmget(keys.state, PAUSE_FIELDS)
        pipe.time()
        for name, _ in deadlines:
            pipe.hlen(keys.held(name))

    counts = yield Atomic(read)
    (stored, delayed, discards, eligible, resource_sets, throttled, limited, paused, *more) = counts
    dead, counted, pauses, now, *held = more
    now_us = int(now[0]) * 1_000_000 + int(now[1])
    return QueueSnapshot(
        name=keys.queue,
        # Each tenant has its own sorted set, so counting the waiting messages would cost a command per
        # tenant.
        waiting=max(stored - delayed - discards - sum(held), 0),
        delayed=delayed,
        held=sum(held),
        discards=discards,
        dead=dead,
        eligible=eligible,
        resource_sets=resource_sets,
        throttled=throttled,
        at_concurrency=limited,
        paused=paused,
        # The leader of a singleton queue has one lease per term.
        consumers=merged(
            ConsumerSnapshot(process_of(name), round((deadline - now_us) / 1e6, 3), count)
            for (name, deadline), count in zip(deadlines, held, strict=True)
        ),
        counters=QueueCounters.read(counted),
        oldest_waiting_s=None,
        pause=read_queue_pause(pauses, now_us),
    )
