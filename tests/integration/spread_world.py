"""A :class:`MovingWorld` with heavy tenants, whose spreads change, and with dedup keys."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import Any

from celery_dq.app.api.broker import MapChanged, OpenQueue, partitions_of, stored_maps
from celery_dq.options import Quota
from celery_dq.protocols import DEDUP_PROPERTY
from celery_dq.transport.message_record import DedupSection, dedup_key_of
from celery_dq.transport.redis.store.message_ids import task_id_of
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.partition_map import PartitionMap
from tests.integration.moving_world import TENANTS, MovingWorld

#: Tenants that are spread now and then.
HEAVY = TENANTS[:3]
#: Messages of a heavy tenant that may run at once.
CONCURRENCY = 8


class KeyedCall:
    """A call with a dedup key, and the verdict on it."""

    def __init__(self, key: str) -> None:
        self.section = DedupSection(key).pack()
        self.status = ""

    def receive_verdict(self, status: str, message_id: str, covering: str, replaced: str) -> None:
        self.status = status


class SpreadWorld(MovingWorld):
    """One queue, whose heavy tenants live in several partitions."""

    def __init__(self, app: Any, url: str, seed: int) -> None:
        super().__init__(app, url, seed)
        #: Accepted task ids of each dedup key, in order.
        self.of_key: dict[tuple[str, str], list[str]] = defaultdict(list)
        self._late: PartitionMap | None = None
        for tenant in HEAVY:
            app.dq.quotas.set("push", tenant, concurrency=CONCURRENCY)

    def publish_keyed(self) -> None:
        """Publish a call with one of a few dedup keys, by a publisher that may know an old map."""
        publisher, tenant = self.random.choice(self.publishers), self.random.choice(HEAVY)
        key = f"k{self.random.randrange(6)}"
        self._numbers[tenant] += 1
        task_id, call = f"{tenant}/{self._numbers[tenant]}", KeyedCall(key)
        headers = {"id": task_id, "task": "notify"}
        options = {"tenant": tenant, "headers": headers, DEDUP_PROPERTY: call}
        self.kombu.publish([], connection=publisher, **options)
        if call.status in ("accepted", "blocked"):
            self.published[tenant].append(task_id)
            self.of_key[tenant, key].append(task_id)

    def set_quota(self) -> None:
        """Set the quota of a heavy tenant, by a process that may have read an old map, and is killed then."""
        with self.app.dq._broker.channel() as channel:
            if self._late is None or self.random.random() < 0.5:
                (self._late,) = stored_maps(channel, ["push"], declare=False)
            tenant = self.random.choice(HEAVY)
            quota = Quota(concurrency=CONCURRENCY, spread=len(self._late.partitions(tenant)))
            late = OpenQueue(partitions_of(channel, "push", self._late), channel.client)
            with suppress(MapChanged):
                late.set_quota(tenant, quota)

    def check_claimed(self, partition: Partition, entry: Any, tenant: str) -> None:
        """Check a heavy tenant's concurrency, and that a dedup key does not run twice at once."""
        if tenant not in HEAVY:
            super().check_claimed(partition, entry, tenant)
            return
        held = [each for _, each, name in self.held if name == tenant]
        assert len(held) < CONCURRENCY, f"{tenant} has {len(held) + 1} running messages"
        key = dedup_key_of(entry.record)
        others = [task_id_of(each.id) for each in held if key and dedup_key_of(each.record) == key]
        assert others == [], f"{entry.id} of key {key} runs beside {others}"

    def step(self, wanted: int | tuple[str, int], kill_after: int | None) -> bool:
        """Change the number of partitions, or the spread of a tenant; return whether it is complete."""
        if isinstance(wanted, int):
            return self.move(wanted, kill_after)
        tenant, spread = wanted
        set_quota = self.app.dq.quotas.set
        return self.change(lambda: set_quota("push", tenant, spread=spread, timeout=0), kill_after)

    def verdict(self) -> dict[str, Any]:
        """Compare as for other tenants, but the order of a heavy tenant within its dedup keys only."""
        found = super().verdict()
        found["disordered"] = [each for each in found["disordered"] if each[0] not in HEAVY]
        for (tenant, key), ids in self.of_key.items():
            ran = [each for each in self.ran[tenant] if each in set(ids)]
            if ran != [each for each in ids if each in set(ran)]:
                found["disordered"].append((tenant, key, ran, ids))
        return found
