"""Move messages from one queue to another without a loss."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import redis

from celery_dq.app.api.audit import AuditedChange
from celery_dq.app.api.broker import OpenQueue
from celery_dq.app.api.progress import OnProgress, ignore_progress
from celery_dq.inspector.messages import find
from celery_dq.inspector.redis_values import Client, text
from celery_dq.inspector.tenants import tenant_snapshot
from celery_dq.inspector.waiting import waiting_of
from celery_dq.transport.message_record import as_moved
from celery_dq.transport.partition_replies import OutgoingRecord
from celery_dq.transport.redis.store.message_ids import task_id_of
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.partition_map import MOVING
from celery_dq.transport.redis.store.rounds import run_one
from celery_dq.transport.redis.store.server_errors import PartitionsChanging

#: Lease of a chunk that is being moved, in milliseconds; after it the source gets the messages back.
LEASE_MS = 30_000
#: Messages in one chunk.
CHUNK = 100


class Mover:
    """A consumer of the source and a producer of the destination, for the duration of one move.

    Each chunk takes three steps: take the messages under a lease, push them under a producer sequence, finish
    them at the source. A push whose answer was lost is repeated without effect. If the process dies before
    the push, the messages stay in the source (as a delivery that crashed). If it dies after the push, they
    are in both queues.

    Args:
        source: The partition that loses the messages.
        destination: All partitions of the queue that gets the messages.
        client: A redis-py client of both.
        head_start_us: The head start of one step of priority in the destination, µs.
    """

    def __init__(
        self, source: Partition, destination: Sequence[Partition], client: Client, head_start_us: int
    ) -> None:
        self._source = source
        self._destination = destination
        self._client = client
        self._head_start_us = head_start_us
        self._name = f"move:{uuid.uuid4().hex}"
        self._sequence = 0

    def move(self, ids: Sequence[str]) -> int:
        """Move those of these messages that wait or are delayed, and return their number."""
        moved = 0
        try:
            for start in range(0, len(ids), CHUNK):
                moved += self._move_chunk(ids[start : start + CHUNK])
        finally:
            self._resign()
        return moved

    def move_tenant(self, tenant: str, on_progress: OnProgress = ignore_progress) -> int:
        """Move all waiting messages of a tenant, in order, and return their number."""
        moved = 0
        try:
            while line := run_one(self._client, waiting_of(self._source.keys, [tenant], CHUNK))[0]:
                step = self._move_chunk([text(each) for each, _ in line])
                moved += step
                on_progress(moved)
                if not step:  # workers have claimed all of them, or they have no record
                    break
        finally:
            self._resign()
        return moved

    def _move_chunk(self, ids: Sequence[str]) -> int:
        taken = self._source.take(self._name, ids, lease_ms=LEASE_MS).run(self._client)
        if not taken:
            return 0
        first = self._destination[0]
        routed: dict[tuple[int, bool], tuple[list[OutgoingRecord], list[tuple[str, str]]]] = {}
        for entry in taken:
            self._sequence += 1
            record, task_id = as_moved(entry.record), task_id_of(entry.id)
            place = first.homes.route(first.keys.queue, record, task_id)
            outgoing, tags = routed.setdefault(place, ([], []))
            outgoing.append(OutgoingRecord(self._sequence, task_id, record))
            tags.append(entry.tag)
        try:
            for place in [*routed]:
                self._push(*place, routed[place][0])
                self._source.ack(self._name, finish=routed.pop(place)[1]).run(self._client)
        except redis.RedisError:
            # Requeue to their old places at once instead of at the end of the lease.
            left = [tag for _, tags in routed.values() for tag in tags]
            self._source.release(self._name, left, mode="requeue").run(self._client)
            raise
        return len(taken)

    def _push(self, number: int, moving: bool, outgoing: Sequence[OutgoingRecord]) -> None:
        """Push messages into one partition of the destination.

        Raises:
            PartitionsChanging: The destination has another map.
        """
        partition = self._destination[number]
        push = partition.push(
            outgoing,
            producer=f"{self._name}{MOVING * moving}",
            marker_ttl_ms=LEASE_MS,
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

    def _resign(self) -> None:
        """End the lease, under which no message is left."""
        while self._source.resign(self._name).run(self._client):
            pass


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
    on_progress: OnProgress,
) -> None:
    """Move a task, or all waiting messages of a tenant, to the end of another queue.

    Args:
        source: The queue that loses the messages.
        destination: The queue that gets them.
        task_id: The task, unless `tenant` is given.
        tenant: The tenant.
        head_start_us: As for :class:`Mover`.
        change: Counts the messages.
        on_progress: Called with the number of messages that have moved so far.
    """
    client = source.client
    if tenant is not None:
        destination.homes.check_set(destination.partitions[0].keys.queue, tenant)
        done = 0
        for each in source.of(tenant)[::-1]:

            def moved(count: int, before: int = done) -> None:
                change.count = before + count
                on_progress(change.count)

            mover = Mover(each, destination.partitions, client, head_start_us)
            done += mover.move_tenant(tenant, moved)
    elif found := find(*source, task_id or ""):
        place = source.partitions[found[0].partition]
        mover = Mover(place, destination.partitions, client, head_start_us)
        change.count = mover.move([found[0].id])
        on_progress(change.count)
