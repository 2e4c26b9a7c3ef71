"""Move tenants to their new homes, after the number of partitions of a queue has changed.

A tenant moves in steps. Each is one script of one partition, and may be repeated:

1. All partitions get the new map. From then on, the former home accepts no message of the tenant, and the
   new home accepts them, but does not serve them.
2. The former home goes on with the tenant's backlog from its beginning. The mover takes messages from its
   end: they go to the *outbox*, then to the new home, then they are deleted.
3. When nothing of the tenant waits or runs in the former home, the new one serves it.

The mover holds no state, so any process may go on after it. An outbox has a number. A partition remembers the
last number from each other partition, and stores no outbox twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from celery_dq.app.api.progress import OnProgress, ignore_progress
from celery_dq.errors import CorruptRecord, InvalidRequest
from celery_dq.inspector.redis_values import Client, chunks, scan_all, text
from celery_dq.transport.redis.store.move_calls import (
    MOVE_CHUNK,
    Outbox,
    departed,
    drop_exported,
    export_messages,
    import_messages,
    open_tenants,
)
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.record import RedisRecord
from celery_dq.transport.redis.store.rounds import Rounds, run_one

__all__ = ["TenantMoves"]


class TenantMoves:
    """The moves of one change of the number of partitions.

    Args:
        client: A redis-py client.
        partitions: All partitions that the queue has before or after the change, with its map.
        head_start_us: By how much each step of priority goes before its time, in µs.
        on_progress: Called with the number of messages that were moved.

    Attributes:
        moved: Number of messages that were moved, dead letters included.
    """

    def __init__(
        self,
        client: Client,
        partitions: Sequence[Partition],
        head_start_us: int,
        on_progress: OnProgress = ignore_progress,
    ) -> None:
        self._client = client
        self._partitions = partitions
        self._homes = partitions[0].homes
        self._head_start_us = head_start_us
        self._on_progress = on_progress
        self.moved = 0

    def step(self) -> int:
        """Move the messages that can be moved, and serve the tenants that have arrived.

        Returns:
            The number of tenants that have not arrived yet.
        """
        left: set[str] = set()
        for source in self._partitions[: self._homes.before]:
            left |= self._empty(source)
        left |= self._open_arrived()
        return len(left)

    def end(self) -> bool:
        """Serve all tenants in their homes; return False when partitions that go still have messages.

        Must follow a :meth:`step` after which no tenant is left.
        """
        for gone in self._partitions[self._homes.count :]:
            if self._client.hlen(gone.keys.messages) or self._client.hlen(gone.keys.dead):
                return False
        for partition in self._partitions[: self._homes.count]:
            call = open_tenants(partition, self._homes, (), everyone=True)
            while (expected := call.run(self._client)) > 0:
                pass
            if expected < 0:
                return False
        return True

    def deliver_outboxes(self) -> None:
        """Store the messages in their homes that were taken out of the former ones."""
        for source in self._partitions[: self._homes.before]:
            self._deliver_outbox(source)

    # -- out of the former home

    def _deliver_outbox(self, source: Partition) -> None:
        self._deliver(source, export_messages(source, "", limit=0).run(self._client))

    def _empty(self, source: Partition) -> set[str]:
        """Move what can be moved out of a partition; return the tenants of which something may be left."""
        self._deliver_outbox(source)
        letters = self._by_tenant(source, run_one(self._client, scan_all("hash", source.keys.dead)))
        delayed = self._delayed(source)
        tenants = self._with_work(source).union(delayed)
        for tenant in tenants | letters.keys():
            self._move_tenant(source, tenant, [*delayed[tenant], *letters.get(tenant, ())])
        return tenants

    def _move_tenant(self, source: Partition, tenant: str, ids: Sequence[str]) -> None:
        for part in chunks(ids):
            for start in range(0, len(part), MOVE_CHUNK):
                some = part[start : start + MOVE_CHUNK]
                self._deliver(source, export_messages(source, tenant, limit=0, ids=some).run(self._client))
        skip = 0
        while True:
            outbox = export_messages(source, tenant, skip=skip).run(self._client)
            skip += outbox.kept
            if not self._deliver(source, outbox) and not outbox.kept:
                return

    def _deliver(self, source: Partition, outbox: Outbox) -> int:
        """Store an outbox in the home of its tenant, and delete it; return its number of messages."""
        if outbox.number == "0":
            return 0
        home = self._partitions[self._homes.home(outbox.tenant)]
        if not import_messages(home, source, outbox, self._homes, self._head_start_us).run(self._client):
            raise InvalidRequest(
                f"Another change of the partitions of queue {source.keys.queue!r} is under way: run it again"
            )
        self.moved += drop_exported(source, outbox).run(self._client)
        self._on_progress(self.moved)
        return len(outbox.messages)

    # -- into the new home

    def _open_arrived(self) -> set[str]:
        """Serve the tenants of which the former home has nothing; return the other ones that are expected."""
        expected: dict[int, list[str]] = defaultdict(list)
        for partition in self._partitions[: self._homes.count]:
            for tenant in run_one(self._client, scan_all("zset", partition.keys.arriving)):
                expected[self._homes.old_home(text(tenant))].append(text(tenant))
        left: set[str] = set()
        for number, tenants in expected.items():
            source = self._partitions[number]
            delayed = self._delayed(source)
            for start in range(0, len(tenants), MOVE_CHUNK):
                chunk = tenants[start : start + MOVE_CHUNK]
                arrivals = departed(source, chunk).run(self._client)
                for name, arrival in zip(chunk, arrivals, strict=True):
                    if arrival and name not in delayed:
                        home = self._partitions[self._homes.home(name)]
                        open_tenants(home, self._homes, [(name, arrival)]).run(self._client)
                    else:
                        left.add(name)
        return left

    # -- reading

    def _with_work(self, source: Partition) -> set[str]:
        """Return the tenants that move and of which messages wait or run in a partition."""
        keys = source.keys
        found: set[str] = set()
        for key in (keys.turn, keys.resource_sets, keys.throttled, keys.at_concurrency, keys.paused):
            found.update(self._leaving(source, run_one(self._client, scan_all("zset", key))))
        found.update(self._leaving(source, run_one(self._client, scan_all("hash", keys.running))))
        return found

    def _leaving(self, source: Partition, tenants: Iterable[bytes]) -> set[str]:
        return {name for name in map(text, tenants) if self._homes.home(name) != source.keys.partition}

    def _delayed(self, source: Partition) -> dict[str, list[str]]:
        """Return the delayed messages of tenants that move: tenant -> ids."""
        ids = run_one(self._client, scan_all("zset", source.keys.delayed))
        found: dict[bytes, bytes] = {}
        for part in chunks([*ids]):
            records = run_one(self._client, _records(source.keys.messages, part))
            found.update({each: record for each, record in zip(part, records, strict=True) if record})
        return self._by_tenant(source, found)

    def _by_tenant(self, source: Partition, records: dict[bytes, bytes]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for each, record in records.items():
            try:
                tenant = RedisRecord.unpack(record).tenant
            except CorruptRecord:
                continue  # a worker makes a dead letter of it
            if self._homes.home(tenant) != source.keys.partition:
                found[tenant].append(text(each))
        return found


def _records(key: str, ids: Sequence[bytes]) -> Rounds[list[bytes | None]]:
    (records,) = yield partial(_put_records, key=key, ids=ids)
    return list(records)


def _put_records(pipe: Any, *, key: str, ids: Sequence[bytes]) -> None:
    pipe.hmget(key, ids)


def deliver_outboxes(partitions: Sequence[Partition], client: Client, head_start_us: int) -> None:
    """Store the messages in their homes that a killed mover had taken out, so that others find them.

    Args:
        partitions: All partitions of a queue, with its map.
        client: A redis-py client.
        head_start_us: As for :class:`TenantMoves`.
    """
    if partitions[0].homes.before is not None:
        TenantMoves(client, partitions, head_start_us).deliver_outboxes()
