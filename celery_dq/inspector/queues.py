"""How a queue stands."""

from __future__ import annotations

from dataclasses import dataclass

from celery_dq.inspector.reading import Client, server_time_us, text
from celery_dq.transport.redis.partition import Partition


@dataclass(frozen=True)
class ConsumerSnapshot:
    """A process that consumes a queue.

    :param name: host, process id and a random part.
    :param lease_s: seconds until its lease expires; negative once it has, until somebody reaps it.
    :param held: messages that it has and has not finished.
    """

    name: str
    lease_s: float
    held: int


@dataclass(frozen=True)
class QueueSnapshot:
    """How a queue stands.

    :param waiting: messages that wait for their turn, whether or not their tenant may be served now.
    :param delayed: messages whose ETA has not come.
    :param held: messages that consumers have and have not finished.
    :param discards: cancelled and expired ones that wait for Celery's bookkeeping.
    :param dead: dead letters.
    :param eligible: tenants that may be served now.
    :param throttled: tenants with a backlog that wait for their rate.
    :param limited: tenants with a backlog that wait for their concurrency.
    :param paused: tenants with a backlog that are paused.
    """

    name: str
    waiting: int
    delayed: int
    held: int
    discards: int
    dead: int
    eligible: int
    throttled: int
    limited: int
    paused: int
    consumers: tuple[ConsumerSnapshot, ...]


def queue_snapshot(partition: Partition, client: Client) -> QueueSnapshot:
    """Read how a queue stands: two round trips, the second with a command per consumer."""
    keys = partition.keys
    deadlines = [(text(name), score) for name, score in client.zrange(keys.leases, 0, -1, withscores=True)]
    pipeline = client.pipeline(transaction=True)
    pipeline.hlen(keys.messages)
    for key in (keys.delayed, keys.discards, keys.turn, keys.throttled, keys.limited, keys.parked):
        pipeline.zcard(key)
    pipeline.hlen(keys.dead)
    for name, _ in deadlines:
        pipeline.hlen(keys.held(name))
    now = server_time_us(client)
    stored, delayed, discards, eligible, throttled, limited, paused, dead, *held = pipeline.execute()
    return QueueSnapshot(
        name=keys.queue,
        # A tenant has a sorted set of its own: counting those would cost a command per tenant.
        waiting=max(stored - delayed - discards - sum(held), 0),
        delayed=delayed,
        held=sum(held),
        discards=discards,
        dead=dead,
        eligible=eligible,
        throttled=throttled,
        limited=limited,
        paused=paused,
        consumers=tuple(
            ConsumerSnapshot(name, round((deadline - now) / 1e6, 3), count)
            for (name, deadline), count in zip(deadlines, held, strict=True)
        ),
    )
