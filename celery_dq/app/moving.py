"""Moves messages from one queue to another without losing one."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import redis

from celery_dq.inspector.reading import Client, text
from celery_dq.inspector.waiting import waiting_of
from celery_dq.transport.redis.partition import Partition
from celery_dq.transport.redis.record import as_moved
from celery_dq.transport.redis.replies import Outgoing

#: How long a chunk may be on its way; then it is given back to the source.
LEASE_MS = 30_000
#: Messages that are on their way at once.
CHUNK = 100


class Mover:
    """A consumer of the source and a producer of the destination, for as long as one move takes.

    Three steps per chunk: take the messages under a lease, push them under a producer's sequence (a
    push whose answer was lost is repeated without effect), finish them at the source. Dying before the
    push leaves them to the source (as a delivery that crashed); dying after it leaves them in both.

    Arguments:
        head_start_us: What a step of priority is worth in the destination, µs.
    """

    def __init__(self, source: Partition, destination: Partition, client: Client, head_start_us: int) -> None:
        self._source = source
        self._destination = destination
        self._client = client
        self._head_start_us = head_start_us
        self._name = f"move:{uuid.uuid4().hex}"
        self._sequence = 0

    def move(self, ids: Sequence[str]) -> int:
        """Move what waits or is delayed of these; returns how many messages moved."""
        moved = 0
        try:
            for start in range(0, len(ids), CHUNK):
                moved += self._move_chunk(ids[start : start + CHUNK])
        finally:
            self._resign()
        return moved

    def move_tenant(self, tenant: str) -> int:
        """Move all that waits for a tenant, in order."""
        moved = 0
        try:
            while line := waiting_of(self._source.keys, self._client, [tenant], CHUNK)[0]:
                step = self._move_chunk([text(each) for each, _ in line])
                moved += step
                if not step:  # all of them were taken by workers, or have no record
                    break
        finally:
            self._resign()
        return moved

    def _move_chunk(self, ids: Sequence[str]) -> int:
        taken = self._source.take(self._name, ids, lease_ms=LEASE_MS).run(self._client)
        if not taken:
            return 0
        outgoing = []
        for entry in taken:
            self._sequence += 1
            outgoing.append(Outgoing(self._sequence, entry.id, as_moved(entry.record)))
        push = self._destination.push(
            outgoing, producer=self._name, marker_ttl_ms=LEASE_MS, head_start_us=self._head_start_us
        )
        tags = [entry.tag for entry in taken]
        try:
            try:
                push.run(self._client)
            except redis.ConnectionError:
                push.run(self._client)
        except redis.RedisError:
            # To their old places at once, rather than when the lease is over.
            self._source.release(self._name, tags, mode="requeue").run(self._client)
            raise
        self._source.finish(self._name, tags).run(self._client)
        return len(taken)

    def _resign(self) -> None:
        """End the lease; by now nothing is held."""
        while self._source.resign(self._name).run(self._client):
            pass
