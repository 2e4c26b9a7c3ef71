"""Snapshots of queues and their consumers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery_dq.inspector.queue_counters import COUNTER_FIELDS, PLACES, QueueCounters, oldest_waiting_s
from celery_dq.inspector.redis_values import Client, server_time_us, text
from celery_dq.transport.redis.store.full_server import read_together
from celery_dq.transport.redis.store.partition import Partition


@dataclass(frozen=True)
class ConsumerSnapshot:
    """A process that consumes a queue.

    Attributes:
        name: Host, process id and a random part.
        lease_s: Seconds until its lease expires; negative after that, until another worker reaps it.
        held: Number of its in-flight messages.
    """

    name: str
    lease_s: float
    held: int


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
        eligible: Tenants that may be served now.
        throttled: Tenants with a backlog that wait for their rate.
        limited: Tenants with a backlog that wait for their concurrency.
        paused: Tenants with a backlog that are paused.
        consumers: The processes that consume the queue.
        counters: The numbers of messages that the broker has handled since the first one.
        oldest_waiting_s: How long its oldest waiting message has waited, in seconds; None without one.
            Delayed messages and those that wait for a dedup lock do not count. With more than 4,000 tenants
            it is that of the next 4,000 in turn; a tenant that moves during the call may be missed. With
            aging priorities another message may have waited longer, by at most nine steps.
    """

    name: str
    waiting: int
    delayed: int
    held: int
    discards: int
    dead: int
    eligible: int
    throttled: int
    at_concurrency: int
    paused: int
    consumers: tuple[ConsumerSnapshot, ...]
    counters: QueueCounters
    oldest_waiting_s: float | None


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


def queue_snapshot(partition: Partition, client: Client, *, ages: bool = True) -> QueueSnapshot:
    """Read the counts of a queue, in a few round trips with one command per consumer.

    Args:
        partition: The partition of the queue.
        client: The client.
        ages: Whether to look for the oldest waiting message, one further round trip per 100 tenants.
    """
    keys = partition.keys
    deadlines = [(text(name), score) for name, score in client.zrange(keys.leases, 0, -1, withscores=True)]
    places = (keys.delayed, keys.discards, keys.turn, keys.throttled, keys.at_concurrency, keys.paused)
    reads: list[tuple[Any, ...]] = [
        ("HLEN", keys.messages),
        *(("ZCARD", key) for key in places),
        ("HLEN", keys.dead),
    ]
    reads += [("HMGET", keys.state, *COUNTER_FIELDS)]
    reads += [("HLEN", keys.held(name)) for name, _ in deadlines]
    now = server_time_us(client)
    stored, delayed, discards, eligible, throttled, limited, paused, dead, counted, *held = read_together(
        client, reads
    )
    tenants = (eligible, throttled, limited, paused)
    served = [place for place, count in zip(PLACES, tenants, strict=True) if count]
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
        throttled=throttled,
        at_concurrency=limited,
        paused=paused,
        consumers=tuple(
            ConsumerSnapshot(name, round((deadline - now) / 1e6, 3), count)
            for (name, deadline), count in zip(deadlines, held, strict=True)
        ),
        counters=QueueCounters.read(counted),
        oldest_waiting_s=oldest_waiting_s(partition, client, served) if ages else None,
    )
