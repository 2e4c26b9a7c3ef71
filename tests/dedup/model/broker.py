"""The scripts of the tenant broker, as the model drives them and looks at them."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Any

from celery_dq.inspector.claims import verdicts
from celery_dq.transport.redis.partition import Partition, load_scripts
from celery_dq.transport.redis.record import DedupSection
from celery_dq.transport.redis.replies import ClaimedEntry, Outgoing, Pushed
from tests.dedup.model.clock import CLOCK, ScriptClock, TimedScripts
from tests.dedup.model.driver import LEASE, Call, Standing
from tests.lua.desk import Desk, make_record

#: Deliveries after which a message that crashes its worker is dead.
MAX_DELIVERIES = 2


@dataclasses.dataclass(repr=False)
class Message(Call):
    """A message; it is a task's delivery to whoever claims it, and keeps its id from one claim to the next.

    Attributes:
        follow, awaited, continues: as in the section of its record.
        due: when it may be delivered, in seconds; 0 is at once.
        expired: nobody may run it any more.
        reason: why it is delivered for its bookkeeping only; '' as long as it may run.
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
    """One partition. The key ``b`` is another tenant's."""

    leases = True
    sweeps: dict[str, str] = {}  # noqa: RUF012  # never written; a Protocol's attribute

    def __init__(self, client: Any) -> None:
        self.client = client
        self.scripts = TimedScripts(load_scripts())

    def reset(self) -> None:
        self.client.flushdb()
        self.clock = ScriptClock(self.client)
        self.desk = Desk(self.client)
        self.desk.partition = Partition(self.desk.keys, self.scripts)

    def at(self, seconds: int) -> None:
        self.clock.at(seconds)

    def forget_scripts(self) -> None:
        self.client.script_flush()

    def told(self) -> set[tuple[str, str]] | None:
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

    def push(self, sequence: int, messages: Sequence[Message]) -> list[Pushed]:
        numbered = enumerate(messages, sequence)
        outgoing = [Outgoing(number, each.id, self.record(each)) for number, each in numbered]
        return self.desk.partition.push(outgoing, producer="p").run(self.client)

    def claim(self, owner: str, want: int) -> list[ClaimedEntry]:
        return self.desk.claim(want, owner, lease_ms=LEASE * 1000, max_deliveries=MAX_DELIVERIES).entries

    def finish(self, owner: str, tags: Sequence[tuple[str, str]]) -> int:
        return self.desk.partition.finish(owner, tags).run(self.client)

    def settle(self, owner: str, tags: Sequence[tuple[str, str]]) -> int:
        return self.desk.partition.settle(owner, tags).run(self.client)

    def release(self, owner: str, tags: Sequence[tuple[str, str]], mode: Any) -> int:
        call = self.desk.partition.release(owner, tags, mode=mode, max_deliveries=MAX_DELIVERIES)
        return call.run(self.client)

    def dead_letter(self, message: Message) -> str:
        tag = (str(message.token), message.id)
        call = self.desk.partition.dead_letter(message.owner, tag, reason="rejected", worker="")
        return str(call.run(self.client))

    def heartbeat(self, owner: str) -> int:
        call = self.desk.partition.renew(owner, lease_ms=LEASE * 1000, max_deliveries=MAX_DELIVERIES)
        return call.run(self.client).reaped

    def lost(self, but: str) -> list[str]:
        """The messages of consumers whose lease is over, in the order in which they will be taken back."""
        found = []
        for owner in self.client.zrangebyscore(self.desk.keys.leases, "-inf", self.clock.micros()):
            if owner.decode() != but:
                held = self.client.hgetall(self.desk.keys.held(owner.decode()))
                score = {each: struct.unpack_from(">dd", packed)[1] for each, packed in held.items()}
                found += sorted(score, key=lambda each: score[each])
        return [each.decode() for each in found]

    def cancel(self, message: Message) -> str:
        (told,) = self.desk.partition.cancel([message.id], tombstone_ttl_ms=0).run(self.client)
        return told

    def evict(self, key: str) -> str:
        return self.desk.partition.evict(*self.scope(key)).run(self.client)

    # -- looks

    def look(self) -> None:
        """Reads all of it at once."""
        keys = self.desk.keys
        hashes, sets = ("messages", "claimants", "following"), ("blocked", "discards", "evictions", "delayed")
        with self.client.pipeline() as pipe:
            for each in hashes:
                pipe.hkeys(getattr(keys, each))
            for name in sets:
                pipe.zrange(getattr(keys, name), 0, -1)
            pipe.hgetall(keys.claims)
            *members, claims = pipe.execute()
        names = (*hashes, *sets)
        self.members = {name: {x.decode() for x in found} for name, found in zip(names, members, strict=True)}
        self.members["waiting"] = {*self.desk.waiting(""), *self.desk.waiting("tenant")}
        self.verdicts = verdicts(self.desk.partition, self.client)
        #: Per scope the token of its head, which places have followers, and who has them.
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
        """What waits for a worker, and has a claim, is the head of its key and does not run."""
        waiting = self.members["waiting"] | self.members["delayed"]
        standing = [self.standing(key) for key in {each.key for each in living}]
        assert waiting & {each.id for each in living} == {each.head for each in standing if not each.token}

    def left(self) -> set[str]:
        known = {"leases", "wake", "verdicts", "dead", "dead_info", "dead_index", "producer:p", CLOCK}
        return {key for key in self.desk.left_over() - known if not key.startswith("lenient:")}
