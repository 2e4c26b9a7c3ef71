"""The scripts keep the machine of every key: whatever happens to messages, they agree with the pure one."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from celery_dq.dedup.machine import Machine, Verdict
from celery_dq.testing.servers import RedisServer
from celery_dq.transport.redis.record import DedupSection
from celery_dq.transport.redis.replies import Outgoing
from tests.lua.desk import Desk, make_record

SCOPES = [("", "k"), ("a", "k"), ("a", "l")]
CONSUMERS = ("c1", "c2")
STATUS = {Verdict.ACCEPT: "accepted", Verdict.BLOCK: "blocked", Verdict.DECLINE: "declined"}

calls = st.tuples(
    st.sampled_from(SCOPES),
    st.builds(
        lambda replace, waiting, follow, awaited: {
            "replace": replace,
            "waiting": waiting,
            "follow": follow,
            "awaited": awaited or follow,
        },
        st.sampled_from([False, False, True]),
        st.sampled_from([True, True, False]),
        st.sampled_from([False, False, True]),
        st.booleans(),
    ),
    st.sampled_from(["", "", "", "delayed", "expired"]),
)


@dataclass
class Message:
    id: str
    scope: tuple[str, str]
    awaited: bool
    kind: str
    reason: str = ""
    settled: bool = False


def keyed(scope: tuple[str, str], kind: str, now_us: int, **options: Any) -> bytes:
    section = DedupSection(scope[1], **options).pack()
    due = now_us + 10**12 if kind == "delayed" else 0
    record = bytearray(make_record(scope[0], due_us=due, expires_us=kind == "expired"))
    record[2] |= 2
    return bytes(record) + section + struct.pack(">H", len(section))


class DedupMachine(RuleBasedStateMachine):
    client: Any

    @initialize()
    def begin(self) -> None:
        self.client.flushdb()
        self.desk = Desk(self.client)
        self.machines = {scope: Machine() for scope in SCOPES}
        self.messages: dict[str, Message] = {}
        self.followers: dict[str, list[str]] = {}
        self.discards: set[str] = set()
        self.held: dict[tuple[str, str], tuple[str, int]] = {}  # tag -> consumer, claim
        self.calls = 0
        self.over = 0

    # -- the model's side of what happens to a message

    def drop(self, message_id: str) -> None:
        del self.messages[message_id]
        self.discards.discard(message_id)
        for follower in self.followers.pop(message_id, []):
            if follower in self.messages and not self.messages[follower].reason:
                self.discard(follower, f"covered:{message_id}")

    def discard(self, message_id: str, reason: str) -> None:
        self.messages[message_id].reason = reason
        self.discards.add(message_id)

    def leave(self, message_id: str, over: bool) -> None:
        """The message has no claim any more; `over`: nor will it be delivered again."""
        machine = self.machines[self.messages[message_id].scope]
        head = machine.head
        if head is not None and head.id == message_id:
            if over and machine.heir is not None and message_id in self.followers:
                later = self.followers.setdefault(machine.heir.id, [])
                later[:0] = self.followers.pop(message_id)
            machine.dequeue(head.id, head.token)
        else:
            machine.dequeue(message_id)

    def enqueue(self, message: Message, **options: Any) -> str:
        """What the push should say."""
        follow, awaited = options.pop("follow"), options.pop("awaited")
        machine = self.machines[message.scope]
        told = machine.enqueue(
            message.id,
            policy="replace" if options["replace"] else "decline",
            waiting=int(options["waiting"]),
            continues=options.get("continues"),
        )
        message.awaited = awaited
        if told.verdict is not Verdict.DECLINE:
            self.messages[message.id] = message
        if told.replaced is not None:
            mine = self.followers.pop(told.replaced, [])
            if self.messages[told.replaced].awaited:
                mine.append(told.replaced)
            else:
                del self.messages[told.replaced]
            if mine:
                self.followers[message.id] = mine
        if told.verdict is Verdict.DECLINE and follow:
            self.messages[message.id] = message
            self.followers.setdefault(told.covering, []).append(message.id)
            return "following"
        return STATUS[told.verdict]

    # -- producers

    def push(self, message: Message, **options: Any) -> None:
        record = keyed(message.scope, message.kind, self.desk.now_us(), **options)
        (pushed,) = self.desk.partition.push([Outgoing(0, message.id, record)]).run(self.client)
        expected = self.enqueue(message, **options)
        assert (pushed.id, pushed.status) == (message.id, expected)
        if expected in ("declined", "following"):
            assert pushed.covering in self.messages

    @rule(call=calls)
    def call(self, call: tuple[tuple[str, str], dict[str, bool], str]) -> None:
        scope, options, kind = call
        self.calls += 1
        self.push(Message(f"m{self.calls}", scope, False, kind), **options)

    @rule(batch=st.lists(calls, min_size=2, max_size=4))
    def call_together(self, batch: list[tuple[tuple[str, str], dict[str, bool], str]]) -> None:
        messages, outgoing = [], []
        for scope, options, kind in batch:
            self.calls += 1
            messages.append((Message(f"m{self.calls}", scope, False, kind), options))
            record = keyed(scope, kind, self.desk.now_us(), **options)
            outgoing.append(Outgoing(0, f"m{self.calls}", record))
        pushed = self.desk.partition.push(outgoing).run(self.client)
        for (message, options), each in zip(messages, pushed, strict=True):
            assert each.status == self.enqueue(message, **options)

    @precondition(lambda self: self.runs())
    @rule(data=st.data(), kind=st.sampled_from(["", "delayed"]))
    def retry(self, data: st.DataObject, kind: str) -> None:
        claim, message_id = data.draw(st.sampled_from(self.runs()))
        scope = self.messages[message_id].scope
        self.calls += 1
        self.push(
            Message(f"m{self.calls}", scope, True, kind),
            replace=False,
            waiting=True,
            follow=False,
            awaited=True,
            continues=(message_id, int(claim)),
        )

    # -- consumers

    def runs(self) -> list[tuple[str, str]]:
        return sorted(tag for tag in self.held if not self.messages[tag[1]].reason)

    @rule(consumer=st.sampled_from(CONSUMERS), want=st.integers(1, 3))
    def claim(self, consumer: str, want: int) -> None:
        claimed = self.desk.claim(want, consumer, max_deliveries=2)
        for entry in claimed.entries:
            message = self.messages[entry.id]
            if entry.reason in ("expired", "dead:max_deliveries") and not message.reason:
                message.reason = entry.reason
                self.leave(entry.id, over=False)
                self.held[tuple(entry.tag)] = (consumer, int(entry.claim))
                continue
            assert entry.reason == message.reason
            self.held[tuple(entry.tag)] = (consumer, int(entry.claim))
            if message.reason:
                self.discards.remove(entry.id)
                continue
            machine = self.machines[message.scope]
            if machine.head is not None and machine.head.id == entry.id:
                # An equal token: a batch claims heads of several keys under one number.
                assert machine.start(entry.id, int(entry.claim), 0.0)

    def tags(self, data: st.DataObject, consumer: str) -> list[tuple[str, str]]:
        mine = sorted(tag for tag, (owner, _) in self.held.items() if owner == consumer)
        return data.draw(st.lists(st.sampled_from(mine), max_size=3, unique=True)) if mine else []

    @precondition(lambda self: self.held)
    @rule(data=st.data(), consumer=st.sampled_from(CONSUMERS))
    def settle(self, data: st.DataObject, consumer: str) -> None:
        tags = self.tags(data, consumer)
        assert self.desk.partition.settle(consumer, tags).run(self.client) == 0
        for tag in tags:
            self.messages[tag[1]].settled = True

    @precondition(lambda self: self.held)
    @rule(data=st.data(), consumer=st.sampled_from(CONSUMERS), twice=st.booleans())
    def finish(self, data: st.DataObject, consumer: str, twice: bool) -> None:
        tags = self.tags(data, consumer)
        assert self.desk.partition.finish(consumer, tags).run(self.client) == 0
        for tag in tags:
            del self.held[tag]
            self.leave(tag[1], over=True)
            self.drop(tag[1])
        if twice:
            assert self.desk.partition.finish(consumer, tags).run(self.client) == len(tags)

    def gave_back(self, tag: tuple[str, str], crashed: bool) -> None:
        """Mirrors `give_back` of one message; a second crash buries it."""
        del self.held[tag]
        message = self.messages[tag[1]]
        crashes = self.crashes.get(tag[1], 0) + crashed
        self.crashes[tag[1]] = crashes
        if message.settled:
            self.leave(tag[1], over=True)
            self.drop(tag[1])
        elif message.reason:
            if crashed and crashes >= 4:
                self.drop(tag[1])
            else:
                self.discards.add(tag[1])
        elif crashed and crashes >= 2:
            self.leave(tag[1], over=False)
            self.discard(tag[1], "dead:max_deliveries")
        else:
            self.came_back(tag, message)

    def came_back(self, tag: tuple[str, str], message: Message) -> None:
        machine = self.machines[message.scope]
        if machine.head is not None and machine.head.id == message.id:
            assert machine.release(message.id, int(tag[0]))
            return
        del self.messages[message.id]
        options = {"replace": False, "waiting": True, "follow": message.awaited, "awaited": message.awaited}
        mine = self.followers.pop(message.id, [])
        if self.enqueue(message, **options) == "declined":
            self.messages[message.id] = message
            self.followers[message.id] = mine
            self.drop(message.id)
        elif mine:
            self.followers[message.id] = mine

    @property
    def crashes(self) -> dict[str, int]:
        return self.__dict__.setdefault("_crashes", {})

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        consumer=st.sampled_from(CONSUMERS),
        mode=st.sampled_from(["unstarted", "requeue", "crashed"]),
    )
    def release(self, data: st.DataObject, consumer: str, mode: Any) -> None:
        for tag in self.tags(data, consumer)[:1]:
            call = self.desk.partition.release(consumer, [tag], mode=mode, max_deliveries=2)
            assert call.run(self.client) == 0
            self.gave_back(tag, mode == "crashed")

    @precondition(lambda self: self.held)
    @rule(consumer=st.sampled_from(CONSUMERS))
    def kill(self, consumer: str) -> None:
        tags = [tag for tag, (owner, _) in self.held.items() if owner == consumer]
        if len(tags) > 1:
            return  # the order in which several come back is the partition model's business
        self.desk.lose(consumer)
        assert self.desk.reap(max_deliveries=2) == len(tags)
        for tag in tags:
            self.gave_back(tag, crashed=True)

    # -- operators and time

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        message_id = data.draw(st.sampled_from(sorted(self.messages)))
        message = self.messages[message_id]
        (told,) = self.desk.partition.cancel([message_id], tombstone_ttl_ms=0).run(self.client)
        if any(tag[1] == message_id for tag in self.held):
            assert told == "claimed"
        elif message.reason:
            assert told == "discarded"
        else:
            assert told in ("waiting", "delayed")
            self.leave(message_id, over=False)
            self.discard(message_id, "cancelled")
            for group in self.followers.values():
                if message_id in group:
                    group.remove(message_id)

    @rule(scope=st.sampled_from(SCOPES))
    def evict(self, scope: tuple[str, str]) -> None:
        evicted = self.desk.partition.evict(*scope).run(self.client)
        head = self.machines[scope].head
        assert evicted == (head.id if head is not None else "")
        if head is not None:
            self.machines[scope].dequeue(head.id, head.token)

    @precondition(lambda self: self.delayed())
    @rule(data=st.data())
    def fall_due(self, data: st.DataObject) -> None:
        self.client.zadd(self.desk.keys.delayed, {data.draw(st.sampled_from(self.delayed())): 1})

    def delayed(self) -> list[str]:
        return [each.decode() for each in self.client.zrange(self.desk.keys.delayed, 0, -1)]

    # -- what must always hold

    @invariant()
    def claims_are_the_machines(self) -> None:
        keys = self.desk.keys
        found = {}
        for scope, packed in self.client.hgetall(keys.claims).items():
            size, _, rest = scope.decode().partition(":")
            since, number, _, marks, head, heir, tail = struct.unpack(">dddBHHH", packed[:31])
            ids = packed[31:].decode()
            parts = ids[:head], ids[head : head + heir], ids[head + heir :][:tail]
            found[rest[: int(size)], rest[int(size) :]] = (*parts, number)
            assert (since > 0) == (number > 0)
            for place, each in enumerate(parts):
                # A mark may outlive the last follower.
                assert not (each and self.followers.get(each)) or marks & 1 << place
        expected = {}
        for scope, machine in self.machines.items():
            if machine.head is not None:
                ids_ = [each.id if each else "" for each in (machine.head, machine.heir, machine.tail)]
                expected[scope] = (*ids_, machine.head.token)
        assert found == expected
        claimants = {each for head, heir, tail, _ in found.values() for each in (head, heir, tail) if each}
        assert {each.decode() for each in self.client.hkeys(keys.claimants)} == claimants
        blocked = {each for _, heir, tail, _ in found.values() for each in (heir, tail) if each}
        assert {each.decode() for each in self.client.zrange(keys.blocked, 0, -1)} == blocked

    @invariant()
    def nothing_is_lost_or_left(self) -> None:
        keys = self.desk.keys
        assert {each.decode() for each in self.client.hkeys(keys.messages)} == set(self.messages)
        waiting_followers = {
            each
            for group in self.followers.values()
            for each in group
            if each in self.messages and not self.messages[each].reason
        }
        assert {each.decode() for each in self.client.hkeys(keys.following)} == waiting_followers
        assert {each.decode() for each in self.client.zrange(keys.discards, 0, -1)} == self.discards
        waiting = {each for tenant in ("", "a") for each in self.desk.waiting(tenant)}
        # What waits for a worker, and has a claim, is the head of its key and does not run.
        heads = {machine.head.id: machine.head for machine in self.machines.values() if machine.head}
        for each in waiting | set(self.delayed()):
            assert each not in heads or not heads[each].started
        for head in heads.values():
            assert head.started or head.id in waiting | set(self.delayed())

    def teardown(self) -> None:
        if not hasattr(self, "machines"):
            return
        while self.desk.partition.purge().run(self.client).more:
            pass
        for tag, (consumer, _) in self.held.items():
            assert self.desk.partition.finish(consumer, [tag]).run(self.client) == 0
        while self.desk.partition.purge().run(self.client).more:
            pass
        left = self.desk.left_over() - {"leases", "wake", "verdicts", "dead", "dead_info", "dead_index"}
        assert left == set()


@pytest.fixture
def client(redis_server: RedisServer, redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def test_the_scripts_keep_the_machine(client: Any) -> None:
    machine = type("Machine", (DedupMachine,), {"client": client})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
