"""A partition with its client: the calls by name, run at once, and the reading of its keys."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from celery_dq.inspector.claim_rates import RunningEntry
from celery_dq.inspector.messages import waiting_of
from celery_dq.keys import PartitionKeys
from celery_dq.options.quota import WHEN_FULL, WhenFull
from celery_dq.transport.message_record import DedupSection
from celery_dq.transport.partition_replies import ClaimReply, DeliveryTag, OutgoingRecord, PushReply
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.rounds import run_one
from celery_dq.transport.redis.store.script_calls import load_scripts

LEASE_MS = 60_000
HOUR_US = 3_600_000_000
PLACES = ("turn", "throttled", "at_concurrency", "paused")
#: Returns the JSON of key -> type and pairs, of each hash and ZSET.
SNAPSHOT = """
local found, reads = {}, {hash = {'hgetall'}, zset = {'zrange', 0, -1, 'withscores'}}
for _, key in ipairs(redis.call('keys', '*')) do
    local kind = redis.call('type', key).ok
    local read = reads[kind]
    found[key] = read and {kind, redis.call(read[1], key, unpack(read, 2))}
end
return cjson.encode(found)
"""


def make_record(
    tenant: str = "",
    *,
    priority: int = 0,
    due_us: int = 0,
    expires_us: int = 0,
    accepted: bool = False,
    task: str = "shop.tasks.notify",
    body: bytes = b"[]",
) -> bytes:
    """A record, packed by the layout that the contract of the scripts states, not by the code under test."""
    parts = (tenant.encode(), task.encode(), b"{}")
    header = struct.pack(">BBBddHHI", 1, priority, 8 * accepted, due_us, expires_us, *map(len, parts))
    return header + b"".join(parts) + body


def make_keyed_record(tenant: str, key: str, kind: str, now_us: int, **options: Any) -> bytes:
    """A record with a dedup key; `kind` is "delayed", "expired" or ""; for the options see `DedupSection`."""
    section = DedupSection(key, **options).pack()
    due_us = now_us + 10**12 if kind == "delayed" else 0
    record = bytearray(make_record(tenant, due_us=due_us, expires_us=kind == "expired"))
    record[2] |= 2
    return bytes(record) + section + struct.pack(">H", len(section))


def make_quota(
    rate: float | None = None,
    *,
    burst: float = 1,
    weight: float = 1,
    concurrency: int = 0,
    paused: bool = False,
    max_waiting: int = 0,
    when_full: WhenFull = "refuse",
) -> bytes:
    interval = 0.0 if rate is None else float(-(-1_000_000 // rate))
    bound = (max_waiting, WHEN_FULL.index(when_full))
    return struct.pack(">ddddBIB", interval, burst, weight, concurrency, paused, *bound)


class PartitionScripts:
    def __init__(self, client: Any, queue: str = "push") -> None:
        self.client: Any = client
        self.keys = PartitionKeys("online", queue)
        self.partition = Partition(self.keys, load_scripts())

    # -- verbs

    def push(
        self, *ids: str, tenant: str = "", head_start_us: int | None = None, **fields: Any
    ) -> list[PushReply]:
        record = make_record(tenant, **fields)
        more: dict[str, Any] = {} if head_start_us is None else {"head_start_us": head_start_us}
        return self.partition.push([OutgoingRecord(0, each, record) for each in ids], **more).run(self.client)

    def push_one(self, task_id: str, tenant: str = "", **fields: Any) -> str:
        return self.push(task_id, tenant=tenant, **fields)[0].id

    def claim(self, want: int = 1, consumer: str = "c1", **options: Any) -> ClaimReply:
        options.setdefault("lease_ms", LEASE_MS)
        return self.partition.claim(consumer, want=want, **options).run(self.client)

    def take(self, want: int = 1, consumer: str = "c1", **options: Any) -> list[str]:
        return [entry.id for entry in self.claim(want, consumer, **options).entries]

    def finish(self, *tags: DeliveryTag, consumer: str = "c1") -> int:
        return self.partition.ack(consumer, finish=tags).run(self.client)

    def settle(self, *tags: DeliveryTag, consumer: str = "c1") -> int:
        return self.partition.ack(consumer, settle=tags).run(self.client)

    def release(
        self, *tags: DeliveryTag, mode: Any = "unstarted", consumer: str = "c1", **options: Any
    ) -> int:
        return self.partition.release(consumer, tags, mode=mode, **options).run(self.client)

    def requeue_and_pause(
        self,
        tag: DeliveryTag,
        *,
        consumer: str = "c1",
        for_us: int = HOUR_US,
        alone: bool = False,
        record: bytes = b"",
        **fields: Any,
    ) -> int:
        call = self.partition.requeue_and_pause(
            consumer,
            tag,
            record=record or make_record(**fields),
            for_us=for_us,
            cause="why",
            alone=alone,
        )
        return call.run(self.client)

    def lose(self, consumer: str = "c1") -> None:
        """Ends a lease, as if its time had passed."""
        self.client.zadd(self.keys.leases, {consumer: 1})

    def reap(self, by: str = "reaper", **options: Any) -> int:
        return self.partition.heartbeat(by, lease_ms=LEASE_MS, **options).run(self.client).reaped

    def set_quota(self, tenant: str, *args: Any, **fields: Any) -> None:
        self.partition.set_quota(tenant, make_quota(*args, **fields)).run(self.client)

    # -- looks

    def place(self, tenant: str) -> str:
        return self.partition.explain_tenant(tenant).run(self.client)["place"]

    def slots(self, tenant: str) -> int:
        return RunningEntry.unpack(self.client.hget(self.keys.running, tenant)).slots

    def make_older(self, by_us: float) -> None:
        """As if the only waiting message, of the tenant ``""``, had come so much earlier."""
        [[(message_id, score)]] = run_one(self.client, waiting_of(self.keys, [""], 10))
        self.client.hset(self.keys.single, "", struct.pack(">d", score - by_us) + message_id)

    def waiting(self, tenant: str = "") -> list[str]:
        return [each.decode() for each, _ in run_one(self.client, waiting_of(self.keys, [tenant], 10_000))[0]]

    def state(self, field: str) -> float:
        return float(self.client.hget(self.keys.state, field) or 0)

    def snapshot(self) -> Mapping[str, Mapping[str, Any]]:
        """All hashes and ZSETs at one moment, and an empty one for any other key, in one round trip."""
        # JSON has no bytes: the character of the same number stands for each of them.
        found = json.loads(self.client.eval(SNAPSHOT, 0).decode("latin-1"))
        keys: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for key, (kind, pairs) in found.items() if found else ():
            keys[key.encode("latin-1").decode()] = {
                name.encode("latin-1").decode(): float(value) if kind == "zset" else value.encode("latin-1")
                for name, value in zip(pairs[::2], pairs[1::2], strict=True)
            }
        return keys

    def token(self) -> bool:
        length = self.client.llen(self.keys.wake)
        assert length <= 1
        return bool(length)

    def take_token(self) -> bool:
        return self.client.lpop(self.keys.wake) is not None

    def now_us(self) -> int:
        seconds, micros = self.client.time()
        return int(seconds * 1_000_000 + micros)

    def left_over(self) -> set[str]:
        """Keys, without their prefix, other than the state hash."""
        prefix = self.keys.prefix
        found = {key.decode().removeprefix(prefix) for key in self.client.keys("*")}
        return found - {"state"}


def tags_of(entries: Sequence[Any]) -> list[DeliveryTag]:
    return [entry.tag for entry in entries]
