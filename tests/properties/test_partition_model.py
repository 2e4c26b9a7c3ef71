"""The scripts against a model of the partition, step by step, on a real server."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from celery_dq.options.quota import WHEN_FULL
from celery_dq.testing.servers import RedisServer
from celery_dq.transport.partition_replies import ClaimedEntry, DeliveryTag, OutgoingRecord
from celery_dq.transport.redis.store.partition import PauseReply
from tests.lua.partition_scripts import LEASE_MS, PartitionScripts, make_quota, make_record
from tests.properties.partition_invariants import CONSUMERS, LINES, TENANTS, WatchedPartition
from tests.properties.partition_messages import Message, Quota
from tests.properties.partition_model import Model

TASKS = ("x", "y", "z", "u", "w", "x~1")
MAX_DELIVERIES = 2
#: µs of a pause that does not end while a test runs.
LONG = 10**12
#: Messages per second: no token comes back while a test runs.
SLOW = 1e-6

tenants = st.sampled_from(TENANTS)
lines = st.sampled_from(LINES)
quotas = st.builds(
    Quota,
    burst=st.sampled_from([0, 0, 1, 3]),
    weight=st.sampled_from([1.0, 1.0, 2.0, 0.5, 3.0]),
    concurrency=st.sampled_from([0, 0, 1, 2]),
    paused=st.sampled_from([False, False, False, True]),
    max_waiting=st.sampled_from([0, 0, 1, 2, 5]),
    when_full=st.sampled_from(WHEN_FULL),
)
messages = st.tuples(
    st.sampled_from(TASKS),
    lines,
    st.sampled_from([0, 0, 0, 3, 9]),
    st.sampled_from(["", "", "", "", "delayed", "expired", "accepted"]),
)


def pack(quota: Quota) -> bytes:
    parts = {**vars(quota), "burst": max(quota.burst, 1)}
    return make_quota(SLOW if quota.burst else None, **parts)


def each_of(entry: ClaimedEntry) -> tuple[str, str, int, bool, str]:
    return entry.id, entry.reason, entry.deliveries, entry.returned, entry.resource


def plain(task: str) -> str:
    return task.replace("~", "~~")


class PartitionMachine(WatchedPartition):
    @initialize(
        batch=st.lists(messages, min_size=8, max_size=16),
        limits=st.lists(st.tuples(tenants, quotas), min_size=2, max_size=4),
    )
    def begin(self, batch: list[tuple[str, str, int, str]], limits: list[tuple[str, Quota]]) -> None:
        self.client.flushdb()
        self.scripts = PartitionScripts(self.client)
        self.model = Model()
        self.tags: list[tuple[str, tuple[str, str]]] = []
        self.sequence = 0
        self.last: list[tuple[OutgoingRecord, Message]] = []
        self.token_taken = False
        self.keeping = set()
        for tenant, quota in limits:
            self.set_quota(tenant, quota)
        self.push(batch, "")

    # -- producers

    @rule(batch=st.lists(messages, min_size=1, max_size=6), producer=st.sampled_from(["", "p"]))
    def push(self, batch: list[tuple[str, str, int, str]], producer: str) -> None:
        sent = []
        for task, tenant, priority, kind in batch:
            self.sequence += 1
            is_expired, is_accepted = kind == "expired", kind == "accepted"
            due = self.scripts.now_us() + 10**12 if kind == "delayed" else 0
            record = make_record(
                tenant, priority=priority, due_us=due, expires_us=is_expired, accepted=is_accepted
            )
            message = Message("", plain(task), tenant, priority, is_expired, due > 0, is_accepted)
            sent.append((OutgoingRecord(self.sequence, task, record), message))
        self.send(sent, producer)
        if producer:
            self.last = sent

    @precondition(lambda self: any(self.model.quota(each).max_waiting for each in LINES))
    @rule(
        data=st.data(), batch=st.lists(messages, min_size=2, max_size=6), producer=st.sampled_from(["", "p"])
    )
    def push_to_a_bounded_tenant(
        self, data: st.DataObject, batch: list[tuple[str, str, int, str]], producer: str
    ) -> None:
        bounded = [each for each in LINES if self.model.quota(each).max_waiting]
        tenant = data.draw(st.sampled_from(bounded))
        self.push([(task, tenant, *others) for task, _, *others in batch], producer)

    def send(self, sent: list[tuple[OutgoingRecord, Message]], producer: str) -> None:
        outgoing = [each for each, _ in sent]
        replies = self.scripts.partition.push(outgoing, producer=producer).run(self.client)
        used: set[str] = set()
        batch = []
        for (each, message), reply in zip(sent, replies, strict=True):
            if reply.status == "seen":
                assert reply.id == each.id
            else:
                expected = self.model.unique(message.task, used)
                used.add(expected or reply.id)
                if reply.status == "full":
                    assert reply.id == each.id
                    assert reply.bound == self.model.quota(message.tenant).max_waiting
                    assert reply.waits == (self.model.quota(message.tenant).when_full == "wait")
                else:
                    assert reply.id == expected if expected else reply.id.startswith(f"{message.task}~1")
            batch.append((each.sequence, dataclasses.replace(message, id=reply.id)))
        statuses = [reply.status for reply in replies]
        assert statuses == self.model.push(batch, producer)
        if set(statuses) != {"seen"}:
            self.token_taken = False

    @precondition(lambda self: self.last)
    @rule(data=st.data())
    def push_again(self, data: st.DataObject) -> None:
        """As after a lost answer, or only some of the messages."""
        chosen = data.draw(st.sets(st.sampled_from(range(len(self.last))), min_size=1))
        self.send([self.last[place] for place in sorted(chosen)], "p")

    @rule(task=st.sampled_from(TASKS), stone=st.sampled_from([False, False, True]))
    def cancel(self, task: str, stone: bool) -> None:
        call = self.scripts.partition.cancel([task], tombstone_ttl_ms=10**7 if stone else 0)
        assert call.run(self.client) == [self.model.cancel(plain(task), stone)]
        self.token_taken = False

    @rule(task=st.sampled_from(TASKS), priority=st.sampled_from([None, 0, 3, 9]), is_later=st.booleans())
    def edit(self, task: str, priority: int | None, is_later: bool) -> None:
        call = self.scripts.partition.edit(task, priority=priority, for_us=LONG if is_later else None)
        outcome = call.run(self.client)
        assert outcome == self.model.edit(plain(task), priority, is_later)
        # A call that changes nothing adds no wake-up.
        if outcome in ("waiting", "delayed"):
            self.token_taken = False

    @precondition(lambda self: self.model.tombstones)
    @rule()
    def tombstones_expire(self) -> None:
        stones = self.scripts.keys.tombstones
        self.client.zadd(stones, dict.fromkeys(self.model.tombstones, 1), xx=True)
        self.model.tombstones.clear()

    @precondition(lambda self: len(self.model.messages) > 10)
    @rule(tenant=lines)
    def cancel_tenant(self, tenant: str) -> None:
        assert self.scripts.partition.cancel_tenant(tenant).run(self.client).moved == (
            self.model.cancel_tenant(tenant)
        )

    @precondition(lambda self: len(self.model.messages) > 24)
    @rule()
    def purge(self) -> None:
        assert self.scripts.partition.purge().run(self.client) == (self.model.purge(), False)

    # -- consumers

    def some_tags(self, data: st.DataObject, consumer: str) -> list[tuple[str, str]]:
        """Tags that this consumer holds, and a few old ones and ones of others."""
        held = self.model.held.get(consumer, {})
        live = [(str(each.claim), i) for i, each in sorted(held.items())]
        # An old tag is most dangerous when its message is held again.
        old = [tag for _, tag in self.tags if tag not in live]
        old = [tag for tag in old if tag[1] in held][-4:] + old[-2:]
        if not live + old:
            return []
        return data.draw(st.lists(st.sampled_from(live + live + old), max_size=5, unique=True))

    @rule(
        data=st.data(),
        consumer=st.sampled_from(CONSUMERS),
        want=st.integers(0, 9),
        free=st.integers(0, 9),
        hold=st.sampled_from([True, False, None]),
        suspects=st.booleans(),
        discards=st.integers(0, 9),
    )
    def claim(
        self,
        data: st.DataObject,
        consumer: str,
        want: int,
        free: int,
        hold: bool | None,
        suspects: bool,
        discards: int,
    ) -> None:
        settle = self.some_tags(data, consumer)
        finish = self.some_tags(data, consumer)
        claimed = self.scripts.claim(
            want,
            consumer,
            free=free,
            hold=hold,
            max_deliveries=MAX_DELIVERIES,
            suspects=suspects,
            discards=discards,
            settle=settle,
            finish=finish,
        )
        stale = self.model.settle(consumer, settle) + self.model.finish(consumer, finish)
        expected = self.model.claim(consumer, want, free, MAX_DELIVERIES, suspects, discards)
        assert [each_of(e) for e in claimed.entries] == expected.entries
        assert claimed.suspect == expected.suspect
        assert claimed.needs_slot == expected.needs_slot
        assert claimed.stale == stale
        assert claimed.more == self.model.may_serve()
        self.remembers(consumer, claimed.next_look_s)
        self.tags += [(consumer, (entry.tag.claim, entry.tag.id)) for entry in claimed.entries]
        self.token_taken = False

    @rule(consumer=st.sampled_from(CONSUMERS))
    def claim_much(self, consumer: str) -> None:
        """The common case, more often than its share."""
        claimed = self.scripts.claim(9, consumer, max_deliveries=MAX_DELIVERIES)
        self.remembers(consumer, claimed.next_look_s)
        expected = self.model.claim(consumer, 9, 9, MAX_DELIVERIES)
        assert [each_of(e) for e in claimed.entries] == expected.entries
        self.tags += [(consumer, (entry.tag.claim, entry.tag.id)) for entry in claimed.entries]
        self.token_taken = False

    def remembers(self, consumer: str, appointment_s: float | None) -> None:
        """The consumer sets its timer from the reply of a claim, or has none."""
        self.keeping.discard(consumer)
        if appointment_s is not None:
            self.keeping.add(consumer)
            assert self.client.hget(self.scripts.keys.state, "next_look_owner") == consumer.encode()

    @rule(data=st.data(), consumer=st.sampled_from(CONSUMERS))
    def settle(self, data: st.DataObject, consumer: str) -> None:
        tags = self.some_tags(data, consumer)
        call = self.scripts.partition.ack(consumer, settle=tags)
        assert call.run(self.client) == self.model.settle(consumer, tags)

    @rule(data=st.data(), consumer=st.sampled_from(CONSUMERS))
    def finish(self, data: st.DataObject, consumer: str) -> None:
        tags = self.some_tags(data, consumer)
        call = self.scripts.partition.ack(consumer, finish=tags)
        assert call.run(self.client) == self.model.finish(consumer, tags)

    @rule(data=st.data(), consumer=st.sampled_from(CONSUMERS))
    def settle_and_finish(self, data: st.DataObject, consumer: str) -> None:
        settle, finish = self.some_tags(data, consumer), self.some_tags(data, consumer)
        stale = self.scripts.partition.ack(consumer, settle=settle, finish=finish).run(self.client)
        assert stale == self.model.settle(consumer, settle) + self.model.finish(consumer, finish)

    @rule(
        data=st.data(),
        consumer=st.sampled_from(CONSUMERS),
        mode=st.sampled_from(["unstarted", "requeue", "crashed"]),
    )
    def release(self, data: st.DataObject, consumer: str, mode: Any) -> None:
        tags = self.some_tags(data, consumer)
        call = self.scripts.partition.release(consumer, tags, mode=mode, max_deliveries=MAX_DELIVERIES)
        assert call.run(self.client) == self.model.release(consumer, tags, mode, MAX_DELIVERIES)

    @precondition(lambda self: any(self.model.held.values()))
    @rule(data=st.data(), consumer=st.sampled_from(CONSUMERS))
    def dead_letter(self, data: st.DataObject, consumer: str) -> None:
        for tag in self.some_tags(data, consumer)[:1]:
            call = self.scripts.partition.dead_letter(consumer, tag, reason="failed", worker="w")
            assert call.run(self.client) == self.model.dead_letter(consumer, tag)

    @precondition(lambda self: any(self.model.held.values()))
    @rule(
        data=st.data(),
        consumer=st.sampled_from(CONSUMERS),
        alone=st.booleans(),
        length=st.sampled_from([LONG // 2, LONG, 2 * LONG]),
    )
    def requeue_and_pause(self, data: st.DataObject, consumer: str, alone: bool, length: int) -> None:
        for tag in self.some_tags(data, consumer)[:1]:
            message = self.model.find(consumer, *tag)
            if message is not None and message.reason:
                continue  # the task of a discard does not run
            fields: dict[str, Any] = (
                {"tenant": message.tenant, "priority": message.priority, "expires_us": message.expired}
                if message is not None
                else {}
            )
            stale = self.scripts.requeue_and_pause(
                DeliveryTag(*tag), consumer=consumer, for_us=length, alone=alone, **fields
            )
            assert stale == self.model.requeue_and_pause(consumer, tag, alone)

    @rule(consumer=st.sampled_from(CONSUMERS))
    def resign(self, consumer: str) -> None:
        assert self.scripts.partition.resign(consumer).run(self.client) == 0
        self.keeping.discard(consumer)
        self.model.give_all(consumer, "unstarted", MAX_DELIVERIES)
        self.token_taken = False

    @rule(consumer=st.sampled_from(CONSUMERS))
    def lose_and_reap(self, consumer: str) -> None:
        self.keeping.discard(consumer)
        self.scripts.lose(consumer)
        assert self.scripts.reap(max_deliveries=MAX_DELIVERIES) == (
            self.model.give_all(consumer, "crashed", MAX_DELIVERIES)
        )
        self.model.promote()
        self.token_taken = False

    @rule(first=st.sampled_from(CONSUMERS), claims=st.booleans())
    def come_back_after_an_outage(self, first: str, claims: bool) -> None:
        """End all leases; no consumer reaps another one."""
        for consumer in CONSUMERS:
            self.scripts.lose(consumer)
        for consumer in sorted(CONSUMERS, key=lambda each: each != first):
            if claims:
                self.remembers(consumer, self.scripts.claim(0, consumer).next_look_s)
            assert self.scripts.reap(consumer, max_deliveries=MAX_DELIVERIES) == 0
        self.model.promote()
        self.token_taken = False

    @rule(consumer=st.sampled_from(CONSUMERS))
    def renew(self, consumer: str) -> None:
        self.scripts.partition.heartbeat(consumer, lease_ms=LEASE_MS).run(self.client)
        self.model.promote()
        self.token_taken = False

    # -- time and waking

    @precondition(lambda self: len(self.model.delayed) > len(self.model.due()))
    @rule(data=st.data())
    def fall_due(self, data: st.DataObject) -> None:
        later = sorted(set(self.model.delayed) - set(self.model.due()))
        message_id = data.draw(st.sampled_from(later))
        self.sequence += 1
        self.client.zadd(self.scripts.keys.delayed, {message_id: self.sequence})
        self.model.delayed[message_id] = self.sequence
        self.token_taken = True  # time passes without a script

    @rule(consumer=st.sampled_from([*CONSUMERS, ""]))
    def hand_over_wakeup(self, consumer: str) -> None:
        self.model.promote()
        served = self.scripts.partition.hand_over_wakeup(consumer).run(self.client)
        assert served == self.model.may_serve()
        self.keeping.discard(consumer)
        self.token_taken = False

    @rule()
    def take_token(self) -> None:
        """A consumer takes the wake-up and dies."""
        self.token_taken = self.scripts.take_token() or self.token_taken

    # -- operators

    @rule(tenant=tenants, quota=quotas | st.none())
    def set_quota(self, tenant: str, quota: Quota | None) -> None:
        self.scripts.partition.set_quota(tenant, pack(quota) if quota else None).run(self.client)
        self.model.set_quota(tenant, quota)
        self.token_taken = False

    @rule(tenant=tenants, pauses=st.booleans(), ends=st.booleans())
    def pause_or_resume(self, tenant: str, pauses: bool, ends: bool) -> None:
        partition, model = self.scripts.partition, self.model
        call = partition.pause(tenant, for_us=LONG * ends) if pauses else partition.resume(tenant)
        reply = call.run(self.client)
        assert isinstance(reply, PauseReply)
        is_same = not (ends or tenant in model.pause_ends) and tenant in model.pauses
        # Nothing is resumed when the pause is over already.
        is_paused = tenant in model.pauses and not model.pause_ends.get(tenant)
        assert reply.changed == (not is_same if pauses else is_paused)
        model.pauses = model.pauses | {tenant} if pauses else model.pauses - {tenant}
        model.pause_ends.pop(tenant, None)
        if pauses and ends:
            model.pause_ends[tenant] = False
        model.put_in_place()
        self.token_taken = False

    @precondition(lambda self: not all(self.model.pause_ends.values()))
    @rule(data=st.data())
    def a_pause_ends(self, data: st.DataObject) -> None:
        later = sorted(tenant for tenant, is_over in self.model.pause_ends.items() if not is_over)
        tenant = data.draw(st.sampled_from(later))
        self.client.zadd(self.scripts.keys.pause_ends, {tenant: 1})
        self.client.hset(self.scripts.keys.state, "resume_at", 1)
        self.model.pause_ends[tenant] = True
        self.token_taken = True  # time passes without a script

    @rule(how=st.sampled_from(["pause", "pause until", "resume", "end"]))
    def pause_queue(self, how: str) -> None:
        partition, keys = self.scripts.partition, self.scripts.keys
        if how == "end":
            if self.model.queue_pauses:
                self.client.hset(keys.state, "paused_until", 1)
                self.token_taken = True  # time passes without a script
        else:
            pauses = how != "resume"
            call = partition.pause(None, for_us=LONG * (how != "pause")) if pauses else partition.resume(None)
            reply = call.run(self.client)
            assert isinstance(reply, PauseReply)
            if not pauses or not self.model.queue_pauses:
                assert reply.changed == (pauses or self.model.queue_pauses)
            self.token_taken = False
        self.model.queue_pauses = how in ("pause", "pause until")

    @rule(quota=quotas)
    def set_default(self, quota: Quota) -> None:
        self.scripts.partition.set_default_quota(pack(quota)).run(self.client)
        self.scripts.partition.place_held_back(TENANTS).run(self.client)
        self.model.default = quota
        for tenant in TENANTS:
            self.model.used[tenant] = min(self.model.used.get(tenant, 0), self.model.quota(tenant).burst)
        self.model.put_in_place()
        self.token_taken = False

    @precondition(lambda self: self.model.dead)
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        message_id = data.draw(st.sampled_from(sorted(self.model.dead)))
        # Its due time would be in the future: send it to run at once.
        dead = self.model.dead[message_id]
        record = make_record(dead.tenant, priority=dead.priority, expires_us=dead.expired)
        new_id = self.scripts.partition.replay(message_id, record=record).run(self.client)
        assert new_id == message_id if message_id not in self.model.messages else new_id != message_id
        assert new_id is not None
        assert new_id not in self.model.messages
        self.model.replay(message_id, new_id)
        self.token_taken = False

    @precondition(lambda self: self.model.dead)
    @rule()
    def forget_dead(self) -> None:
        ids = sorted(self.model.dead)[:2]
        assert self.scripts.partition.forget_dead(ids).run(self.client) == len(ids)
        for each in ids:
            del self.model.dead[each]

    @precondition(lambda self: self.model.messages)
    @rule()
    def recover(self) -> None:
        """Each message has its place, so that nothing is recovered."""
        assert self.scripts.partition.recover(sorted(self.model.messages)).run(self.client) == 0


@pytest.fixture
def client(redis_server: RedisServer, redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url, socket_timeout=None) as client:
        yield client


# Half a minute of an idle machine, more than a minute of a busy one.
@pytest.mark.timeout(300)
def test_a_partition_behaves_as_the_model(client: Any) -> None:
    machine = type("Machine", (PartitionMachine,), {"client": client})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=100,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
