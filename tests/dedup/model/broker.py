"""The driver of the scripts of the tenant broker."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Any

from celery_dq.inspector.dedup_locks import verdicts
from celery_dq.transport.message_record import DedupSection
from celery_dq.transport.partition_replies import ClaimedEntry, OutgoingRecord, PushReply
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_calls import load_scripts
from tests.dedup.model.clock import CLOCK, ScriptClock, TimedScripts
from tests.dedup.model.driver import LEASE, Call, Standing
from tests.lua.partition_scripts import PartitionScripts, make_record

#: Deliveries after which a message that crashes its worker is dead.
MAX_DELIVERIES = 2


@dataclasses.dataclass(repr=False)
class Message(Call):
    """A message: the delivery of a task to the worker that claims it. All its claims have the same id.

    Attributes:
        follow, awaited, continues: as in the section of its record.
        due: the time from which it may be delivered, in seconds; 0 is at once.
        expired: it may not run.
        reason: the reason of a discard; '' while it may run.
        settled: acknowledged before it ran.
        retried: its continuation has been published.
    """

    follow: bool = False
    awaited: bool = False
    continues: tuple[str, int] = ("", 0)
    due: int = 0
    expired: bool = False
    reason: str = ""
    settled: bool = False
    retried: bool = False
    crashes: int = 0


class BrokerDriver:
    """One partition. The key ``b`` belongs to another tenant."""

    leases = True
    sweeps: dict[str, str] = {}  # noqa: RUF012  # never written; a Protocol's attribute

    def __init__(self, client: Any) -> None:
        self.client = client
        self.scripts = TimedScripts(load_scripts())

    def reset(self) -> None:
        self.client.flushdb()
        self.clock = ScriptClock(self.client)
        self.partition_scripts = PartitionScripts(self.client)
        self.partition_scripts.partition = Partition(self.partition_scripts.keys, self.scripts)

    def at(self, seconds: int) -> None:
        self.clock.at(seconds)

    def forget_scripts(self) -> None:
        self.client.script_flush()

    def woken_owners(self) -> set[tuple[str, str]] | None:
        return None

    # -- verbs

    @staticmethod
    def scope(key: str) -> tuple[str, str]:
        return ("tenant" if key == "b" else "", key)

    def record(self, message: Message) -> bytes:
        tenant, key = self.scope(message.key)
        section = DedupSection(
            key,
            (message.timeout or 0) * 1_000_000,
            replace=message.policy == "replace",
            waiting=bool(message.waiting),
            follow=message.follow,
            awaited=message.awaited,
            continues=message.continues,
        ).pack()
        due = self.clock.micros(message.due) if message.due else 0
        record = bytearray(make_record(tenant, due_us=due, expires_us=int(message.expired)))
        record[2] |= 2
        return bytes(record) + section + struct.pack(">H", len(section))

    def push(self, sequence: int, messages: Sequence[Message]) -> list[PushReply]:
        numbered = enumerate(messages, sequence)
        outgoing = [OutgoingRecord(number, each.id, self.record(each)) for number, each in numbered]
        return self.partition_scripts.partition.push(outgoing, producer="p").run(self.client)

    def claim(self, owner: str, want: int) -> list[ClaimedEntry]:
        return self.partition_scripts.claim(
            want, owner, lease_ms=LEASE * 1000, max_deliveries=MAX_DELIVERIES
        ).entries

    def discarded(self) -> dict[str, str]:
        """The reasons of the discards that wait, in their order."""
        keys = self.partition_scripts.keys
        ids = self.client.zrange(keys.discards, 0, -1)
        reasons = self.client.hmget(keys.reasons, ids) if ids else []
        return {each.decode(): reason.decode() for each, reason in zip(ids, reasons, strict=True)}

    def finish(self, owner: str, tags: Sequence[tuple[str, str]]) -> int:
        return self.partition_scripts.partition.ack(owner, finish=tags).run(self.client)

    def settle(self, owner: str, tags: Sequence[tuple[str, str]]) -> int:
        return self.partition_scripts.partition.ack(owner, settle=tags).run(self.client)

    def release(self, owner: str, tags: Sequence[tuple[str, str]], mode: Any) -> int:
        call = self.partition_scripts.partition.release(owner, tags, mode=mode, max_deliveries=MAX_DELIVERIES)
        return call.run(self.client)

    def dead_letter(self, message: Message) -> str:
        tag = (str(message.token), message.id)
        call = self.partition_scripts.partition.dead_letter(message.owner, tag, reason="rejected", worker="")
        return str(call.run(self.client))

    def heartbeat(self, owner: str) -> int:
        call = self.partition_scripts.partition.heartbeat(
            owner, lease_ms=LEASE * 1000, max_deliveries=MAX_DELIVERIES
        )
        return call.run(self.client).reaped

    def lost(self, but: str) -> list[str]:
        """The messages of consumers whose lease is over, in the order in which they will be reaped."""
        found = []
        for owner in self.client.zrangebyscore(
            self.partition_scripts.keys.leases, "-inf", self.clock.micros()
        ):
            if owner.decode() != but:
                held = self.client.hgetall(self.partition_scripts.keys.held(owner.decode()))
                score = {each: struct.unpack_from(">dd", packed)[1] for each, packed in held.items()}
                found += sorted(score, key=lambda each: score[each])
        return [each.decode() for each in found]

    def cancel(self, message: Message) -> str:
        (reported,) = self.partition_scripts.partition.cancel([message.id], tombstone_ttl_ms=0).run(
            self.client
        )
        return reported

    def evict(self, key: str) -> str:
        return self.partition_scripts.partition.evict(*self.scope(key)).run(self.client)

    # -- looks

    def look(self) -> None:
        keys = self.partition_scripts.keys
        hashes, sets = (
            ("messages", "dedup_members", "following"),
            ("blocked", "discards", "evictions", "delayed"),
        )
        with self.client.pipeline() as pipe:
            for each in hashes:
                pipe.hkeys(getattr(keys, each))
            for name in sets:
                pipe.zrange(getattr(keys, name), 0, -1)
            pipe.hgetall(keys.dedup_locks)
            *members, claims = pipe.execute()
        names = (*hashes, *sets)
        self.members = {name: {x.decode() for x in found} for name, found in zip(names, members, strict=True)}
        self.members["waiting"] = {
            *self.partition_scripts.waiting(""),
            *self.partition_scripts.waiting("tenant"),
        }
        (self.verdicts,) = verdicts([[self.partition_scripts.partition]], self.client)
        #: Scope -> the token of its head, the places with followers, and the messages in the places.
        self.claims = {scope.decode(): self._claim(packed) for scope, packed in claims.items()}

    @staticmethod
    def _claim(packed: bytes) -> tuple[int, int, list[str]]:
        since, number, _, marks, head, heir, tail = struct.unpack(">dddBHHH", packed[:31])
        ids = packed[31:].decode()
        assert (since > 0) == (number > 0)
        return int(number), marks, [ids[:head], ids[head : head + heir], ids[head + heir :][:tail]]

    def scope_field(self, key: str) -> str:
        tenant, name = self.scope(key)
        return f"{len(tenant)}:{tenant}{name}"

    def standing(self, key: str) -> Standing:
        number, _, parts = self.claims.get(self.scope_field(key), (0, 0, ["", "", ""]))
        return Standing._make([*parts, number])

    def check(self, living: Sequence[Call]) -> None:
        """Check that a waiting message of a dedup key is the head of the key, and does not run.

        Each message has its place, so that none can be recovered.
        """
        ids = sorted(self.members["messages"])
        assert not ids or self.partition_scripts.partition.recover(ids, dry_run=True).run(self.client) == 0
        waiting = self.members["waiting"] | self.members["delayed"]
        standing = [self.standing(key) for key in {each.key for each in living}]
        assert waiting & {each.id for each in living} == {each.head for each in standing if not each.token}

    def left(self) -> set[str]:
        known = {"leases", "wake", "verdicts", "dead", "dead_info", "dead_index", "producer:p", CLOCK}
        return {
            key for key in self.partition_scripts.left_over() - known if not key.startswith("reap_grace:")
        }
