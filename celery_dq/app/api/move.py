"""Move messages from one queue to another without a loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, takewhile

import redis

from celery_dq.app.api.audit import AuditedChange, OnProgress, ignore_progress
from celery_dq.app.api.broker import OpenQueue
from celery_dq.inspector.messages import find, waiting_of
from celery_dq.inspector.queues import MOVE
from celery_dq.inspector.redis_values import Client, text
from celery_dq.inspector.tenants import tenant_snapshot
from celery_dq.migration.tenant_source import BATCH, Batch, TenantSource
from celery_dq.transport.message_record import as_moved
from celery_dq.transport.partition_replies import ClaimedEntry, OutgoingRecord
from celery_dq.transport.redis.store.message_ids import task_id_of
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.rounds import run_one
from celery_dq.transport.redis.store.server_errors import PartitionsChanging

#: For how long the messages of an interrupted move are kept for the next one, in milliseconds.
LEASE_MS = 600_000
#: For how long the destination knows the batches that it has got, in milliseconds: also those whose lease is
#: over while no worker lives that would reap them.
MARKER_TTL_MS = 24 * 3_600_000


class Mover:
    """Moves messages of one partition to another queue.

    A partition of the destination stores its messages of a batch once, under the name of the batch. A process
    that dies leaves its batch under the lease. The next move to the same queue begins with it.

    Args:
        source: The partition that loses the messages.
        destination: All partitions of the queue that gets the messages.
        client: A redis-py client of both.
        head_start_us: The head start of one step of priority in the destination, µs.

    Attributes:
        consumer: The name under which it takes messages.
    """

    def __init__(
        self, source: Partition, destination: Sequence[Partition], client: Client, head_start_us: int
    ) -> None:
        # The name does not end with that of the queue, whose end might look like a fencing token.
        self.consumer = f"{MOVE}{destination[0].keys.queue}:"
        self._source = TenantSource(source, client, self.consumer, LEASE_MS)
        self._destination = destination
        self._client = client
        self._head_start_us = head_start_us

    def move(self, pages: Iterable[Sequence[str]] = (), moved: OnProgress = ignore_progress) -> None:
        """Complete an interrupted move. Then move messages that wait or are delayed.

        Args:
            pages: Their ids. A page of which no message waits ends the move.
            moved: Called after each step with the number of messages that it has moved.
        """
        try:
            taken = takewhile(lambda batch: batch.entries, map(self._source.take, pages))
            for batch in chain(self._source.interrupted(), taken):
                self._move(batch, moved)
        finally:
            self._source.end()

    def _move(self, batch: Batch, moved: OnProgress) -> None:
        try:
            for place, part in self._parts(batch):
                self._push(*place, part)
                moved(self._source.finish(part))
        except (redis.ConnectionError, redis.TimeoutError):
            raise  # the destination may have stored a part, so that the next move must find it
        except Exception:
            self._source.release(batch.entries)
            raise

    def _parts(self, batch: Batch) -> list[tuple[tuple[int, bool], Batch]]:
        """Divide a batch among the partitions of the destination."""
        first, places = self._destination[0], defaultdict[tuple[int, bool], list[ClaimedEntry]](list)
        for entry in batch.entries:
            places[first.homes.route(first.keys.queue, entry.record, task_id_of(entry.id))].append(entry)
        return [(place, replace(batch, entries=tuple(part))) for place, part in places.items()]

    def _push(self, number: int, moving: bool, batch: Batch) -> None:
        """Push messages into one partition of the destination."""
        partition = self._destination[number]
        push = partition.push(
            [
                OutgoingRecord(sequence, task_id_of(entry.id), as_moved(entry.record))
                for sequence, entry in enumerate(batch.entries, 1)
            ],
            producer=self._source.name_of(batch),
            marker_ttl_ms=MARKER_TTL_MS,
            head_start_us=self._head_start_us,
            moving=moving,
        )
        try:
            replies = push.run(self._client)
        except redis.ConnectionError:
            replies = push.run(self._client)
        if any(reply.status == "misrouted" for reply in replies):
            raise PartitionsChanging(
                f"The number of partitions of queue {partition.keys.queue!r} has just changed; "
                "the rest was not moved: move again"
            )


def movable(source: OpenQueue, task_id: str | None, tenant: str | None) -> int:
    """Count the messages that :func:`move_chosen` would move."""
    if tenant is not None:
        return sum(tenant_snapshot(each, source.client, tenant).waiting for each in source.of(tenant))
    found = find(*source, task_id or "")
    return sum(each.state in ("waiting", "delayed") for each in found)


def move_chosen(
    source: OpenQueue,
    destination: OpenQueue,
    task_id: str | None,
    tenant: str | None,
    head_start_us: int,
    change: AuditedChange,
) -> None:
    """Move a task, or all waiting messages of a tenant, to the end of another queue.

    Args:
        source: The queue that loses the messages.
        destination: The queue that gets them.
        task_id: The task, unless `tenant` is given.
        tenant: The tenant.
        head_start_us: As for :class:`Mover`.
        change: Counts the messages.
    """
    client = source.client
    if tenant is not None:
        destination.homes.check_set(destination.partitions[0].keys.queue, tenant)
        for each in source.of(tenant)[::-1]:
            mover = Mover(each, destination.partitions, client, head_start_us)
            mover.move(_waiting(each, client, tenant), change.add)
    elif found := find(*source, task_id or ""):
        place = source.partitions[found[0].partition]
        Mover(place, destination.partitions, client, head_start_us).move([[found[0].id]], change.add)


def _waiting(partition: Partition, client: Client, tenant: str) -> Iterator[list[str]]:
    """Yield ids of messages of a tenant, in order, until none waits."""
    while line := run_one(client, waiting_of(partition.keys, [tenant], BATCH))[0]:
        yield [text(each) for each, _ in line]
