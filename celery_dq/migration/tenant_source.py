"""One partition of a tenant broker as the source of a move, or of a migration back.

The move is a consumer of the partition. It takes a batch of messages under a lease, so that no worker gets
them, and finishes them when the target has the batch. A batch that was taken stays as it is: its claim
number and its ids name it. A process that dies leaves its batches under the lease, and the next one begins
with them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence, Set as AbstractSet
from dataclasses import dataclass
from hashlib import blake2b
from itertools import zip_longest

from celery_dq.inspector.messages import waiting_of
from celery_dq.inspector.queue_counters import PLACES
from celery_dq.inspector.redis_values import Client, scan, text
from celery_dq.transport.partition_replies import ClaimedEntry
from celery_dq.transport.redis.store.partition import MAX_CHUNK, Partition
from celery_dq.transport.redis.store.rounds import run_one

__all__ = ["BATCH", "Batch", "TenantSource"]

#: Messages of one batch.
BATCH = 200
#: Tenants that share a batch.
TENANTS = 40
#: The beginning of an entry of an in-flight message: claim number and score.
_ENTRY = struct.Struct(">dd")


@dataclass(frozen=True)
class Batch:
    """Messages that were taken together, in the order of their delivery."""

    claim: str
    entries: tuple[ClaimedEntry, ...]


class TenantSource:
    """The messages of a partition, for one consumer.

    Args:
        partition: The partition.
        client: A client of its server.
        consumer: The name of the consumer, which is the same for the next process.
        lease_ms: For how long the messages of a process that dies are kept for the next one.
    """

    def __init__(self, partition: Partition, client: Client, consumer: str, lease_ms: int) -> None:
        self._partition = partition
        self._client = client
        self._consumer = consumer
        self._lease_ms = lease_ms

    def reap(self, max_deliveries: int) -> None:
        """Return the messages of lost workers to the places where they waited.

        Args:
            max_deliveries: As for workers: deliveries after which a message that crashes is dead; 0 is never.
        """
        reaped = MAX_CHUNK
        while reaped == MAX_CHUNK:
            call = self._partition.heartbeat(
                self._consumer, lease_ms=self._lease_ms, limit=MAX_CHUNK, max_deliveries=max_deliveries
            )
            reaped = call.run(self._client).reaped

    def interrupted(self) -> list[Batch]:
        """Return the batches that a process has taken and not finished."""
        keys = self._partition.keys
        # No worker may reap them now.
        self._partition.heartbeat(self._consumer, lease_ms=self._lease_ms, limit=0).run(self._client)
        batches: dict[float, list[tuple[float, bytes]]] = {}
        for message_id, entry in self._client.hgetall(keys.held(self._consumer)).items():
            claim, score = _ENTRY.unpack_from(entry)
            batches.setdefault(claim, []).append((score, message_id))
        moves = []
        for number, rows in sorted(batches.items()):
            ids, claim = [each for _, each in sorted(rows)], f"{number:.0f}"
            records = self._client.hmget(keys.messages, ids)
            entries = [
                ClaimedEntry(text(each), claim, 0, "", record)
                for each, record in zip(ids, records, strict=True)
                if record is not None
            ]
            moves.append(Batch(claim, tuple(entries)))
        return moves

    def pages(self, left: AbstractSet[str]) -> Iterator[list[str]]:
        """Yield ids of messages that wait, at most :data:`BATCH` in one page, once round all tenants.

        The messages of a tenant come in order; those of several tenants, in turns. Delayed ones come last.

        Args:
            left: Ids that are not wanted.
        """
        keys = self._partition.keys
        for place in PLACES:
            for chunk in scan(self._client, "zset", getattr(keys, place)):
                names = [text(each) for each, _ in chunk]
                for start in range(0, len(names), TENANTS):
                    tenants = names[start : start + TENANTS]
                    lines = run_one(
                        self._client, waiting_of(keys, tenants, BATCH // len(tenants) + len(left))
                    )
                    in_turns = (each for turn in zip_longest(*lines) for each in turn if each is not None)
                    yield [each for each in (text(row[0]) for row in in_turns) if each not in left][:BATCH]
        delayed = self._client.zrange(keys.delayed, 0, BATCH + len(left) - 1)
        yield [each for each in map(text, delayed) if each not in left][:BATCH]

    def take(self, ids: Sequence[str]) -> Batch:
        """Take those of these messages that still wait."""
        entries = self._partition.take(self._consumer, ids, lease_ms=self._lease_ms).run(self._client)
        return Batch(entries[0].claim if entries else "", tuple(entries))

    def name_of(self, batch: Batch) -> str:
        """Return the name of a batch: the same for each process that reads it, and of no other batch."""
        ids = sorted(entry.id for entry in batch.entries)
        digest = blake2b(repr(ids).encode(), digest_size=8).hexdigest()
        return f"{self._partition.keys.prefix}{batch.claim}.{digest}"

    def release(self, entries: Sequence[ClaimedEntry]) -> None:
        """Return messages to their places."""
        tags = [entry.tag for entry in entries]
        self._partition.release(self._consumer, tags, mode="requeue").run(self._client)

    def finish(self, batch: Batch) -> int:
        """Remove a batch that the target has; return how many messages were still there."""
        tags = [entry.tag for entry in batch.entries]
        return len(tags) - self._partition.ack(self._consumer, finish=tags).run(self._client)

    def end(self) -> None:
        """End the lease, unless another process has taken a batch under it."""
        self._partition.resign(self._consumer, limit=0).run(self._client)
