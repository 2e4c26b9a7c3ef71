"""After any events, each tenant with waiting messages is in line, and all messages come out.

The other models check each step on its own. This one checks only invariants, and combines all steps: keyed
and plain messages of one tenant, claims that pass over suspects, and consumers that die or resign with
settled and unsettled messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from celery_dq.inspector.claim_rates import RunningEntry
from celery_dq.testing.servers import RedisServer
from celery_dq.transport.partition_replies import DeliveryTag, OutgoingRecord
from tests.lua.partition_scripts import PLACES, PartitionScripts, make_keyed_record, make_quota, make_record

TENANTS = ("", "a", "b", "c", "d")
CONSUMERS = ("c1", "c2")
MAX_DELIVERIES = 3

tenants = st.sampled_from(TENANTS)
consumers = st.sampled_from(CONSUMERS)
calls = st.tuples(
    # Most are of one tenant and one key, so that things happen together.
    st.sampled_from(["", "", "", "", "a", "a", "b", "c", "d"]),
    st.sampled_from(["", "k", "k", "l"]),
    st.sampled_from(["", "", "", "", "", "", "delayed", "expired"]),
    st.sampled_from([{}, {}, {}, {"replace": True}, {"waiting": False}]),
)
few_quotas = st.sampled_from(
    [
        make_quota(concurrency=1),
        make_quota(paused=True),
        make_quota(0.001),
        make_quota(weight=2),
        None,
        None,
    ]
)


class StandingMachine(RuleBasedStateMachine):
    client: Any

    @initialize(batch=st.lists(calls, min_size=4, max_size=12))
    def begin(self, batch: list[tuple[str, str, str, dict[str, bool]]]) -> None:
        self.client.flushdb()
        self.scripts = PartitionScripts(self.client)
        self.calls = 0
        self.plain: list[str] = []
        self.held: dict[str, list[DeliveryTag]] = {consumer: [] for consumer in CONSUMERS}
        self.push(batch)
        self.claim_all("c1", True)

    # -- producers

    @rule(batch=st.lists(calls, min_size=1, max_size=4))
    def push(self, batch: list[tuple[str, str, str, dict[str, bool]]]) -> None:
        outgoing = []
        for tenant, key, kind, options in batch:
            self.calls += 1
            now_us = self.scripts.now_us()
            if key:
                record = make_keyed_record(
                    tenant, key, kind, now_us, **{"replace": False, "waiting": True, **options}
                )
            else:
                self.plain.append(f"m{self.calls}")
                due_us = now_us + 10**12 if kind == "delayed" else 0
                record = make_record(tenant, due_us=due_us, expires_us=kind == "expired")
            outgoing.append(OutgoingRecord(0, f"m{self.calls}", record))
        self.scripts.partition.push(outgoing).run(self.client)

    @rule()
    def fall_due(self) -> None:
        delayed = self.client.zrange(self.scripts.keys.delayed, 0, -1)
        if delayed:
            self.client.zadd(self.scripts.keys.delayed, dict.fromkeys(delayed, 1))

    # -- consumers

    def some(self, data: st.DataObject, consumer: str) -> list[DeliveryTag]:
        mine = self.held[consumer]
        return data.draw(st.lists(st.sampled_from(mine), max_size=4, unique=True)) if mine else []

    def let_go(self, consumer: str, tags: list[DeliveryTag]) -> None:
        self.held[consumer] = [tag for tag in self.held[consumer] if tag not in tags]

    @rule(consumer=consumers, suspects=st.booleans())
    def claim_all(self, consumer: str, suspects: bool) -> None:
        """The common case, more often than its share."""
        claimed = self.scripts.claim(20, consumer, suspects=suspects, max_deliveries=MAX_DELIVERIES)
        self.held[consumer] += [entry.tag for entry in claimed.entries]

    @rule(
        data=st.data(),
        consumer=consumers,
        want=st.integers(1, 8),
        free=st.integers(0, 3),
        suspects=st.booleans(),
    )
    def claim(self, data: st.DataObject, consumer: str, want: int, free: int, suspects: bool) -> None:
        settle, finish = self.some(data, consumer), self.some(data, consumer)
        claimed = self.scripts.claim(
            want,
            consumer,
            free=free,
            suspects=suspects,
            max_deliveries=MAX_DELIVERIES,
            settle=settle,
            finish=finish,
        )
        self.let_go(consumer, finish)
        self.held[consumer] += [entry.tag for entry in claimed.entries]

    def settle_some(self, data: st.DataObject, consumer: str) -> None:
        assert self.scripts.settle(*self.some(data, consumer), consumer=consumer) == 0

    @rule(data=st.data(), consumer=consumers)
    def finish(self, data: st.DataObject, consumer: str) -> None:
        tags = self.some(data, consumer)
        assert self.scripts.finish(*tags, consumer=consumer) == 0
        self.let_go(consumer, tags)

    @rule(data=st.data(), consumer=consumers, mode=st.sampled_from(["unstarted", "requeue", "crashed"]))
    def release(self, data: st.DataObject, consumer: str, mode: str) -> None:
        tags = self.some(data, consumer)
        assert self.scripts.release(*tags, mode=mode, consumer=consumer, max_deliveries=MAX_DELIVERIES) == 0
        self.let_go(consumer, tags)

    @rule(data=st.data(), consumer=consumers, more=st.lists(calls, max_size=3), dies=st.booleans())
    def take_all_and_go(
        self,
        data: st.DataObject,
        consumer: str,
        more: list[tuple[str, str, str, dict[str, bool]]],
        dies: bool,
    ) -> None:
        """A consumer takes all messages, further calls come, some tasks start, and the consumer dies."""
        self.claim_all(consumer, True)
        if more:
            self.push(more)
        self.settle_some(data, consumer)
        if dies:
            self.kill(consumer)
        else:
            assert self.scripts.partition.resign(consumer).run(self.client) == 0
            self.held[consumer].clear()

    def kill(self, consumer: str) -> None:
        self.scripts.lose(consumer)
        assert self.scripts.reap(max_deliveries=MAX_DELIVERIES) == len(self.held[consumer])
        self.held[consumer].clear()

    @rule(data=st.data(), consumer=consumers)
    def take(self, data: st.DataObject, consumer: str) -> None:
        # A keyed one that is taken by name may still be replaced by a later call.
        ids = data.draw(st.lists(st.sampled_from(self.plain), max_size=2, unique=True)) if self.plain else []
        entries = self.scripts.partition.take(consumer, ids, lease_ms=60_000).run(self.client)
        self.held[consumer] += [entry.tag for entry in entries]

    # -- operators

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ids = [f"m{data.draw(st.integers(1, self.calls))}" for _ in range(2)]
        self.scripts.partition.cancel(ids, tombstone_ttl_ms=0).run(self.client)

    @rule(tenant=tenants)
    def cancel_tenant(self, tenant: str) -> None:
        self.scripts.partition.cancel_tenant(tenant).run(self.client)

    @rule(tenant=tenants, key=st.sampled_from(["k", "l"]))
    def evict(self, tenant: str, key: str) -> None:
        self.scripts.partition.evict(tenant, key).run(self.client)

    @rule(limit=st.integers(1, 4))
    def purge_a_few(self, limit: int) -> None:
        self.scripts.partition.purge(limit=limit).run(self.client)

    @rule(tenant=tenants, quota=few_quotas)
    def set_quota(self, tenant: str, quota: bytes | None) -> None:
        self.scripts.partition.set_quota(tenant, quota).run(self.client)

    @rule(tenant=tenants, pauses=st.booleans())
    def pause_or_resume(self, tenant: str, pauses: bool) -> None:
        partition = self.scripts.partition
        (partition.pause if pauses else partition.resume)(tenant).run(self.client)

    # -- invariants

    @invariant()
    def all_is_in_its_place(self) -> None:
        keys, seen = self.scripts.keys, self.scripts.snapshot()
        lines = [tenant for tenant in TENANTS if seen[keys.tenant(tenant)]]
        # Each waiting tenant has its messages in one form, and stands in one of `PLACES`.
        waiting = Counter([*lines, *seen[keys.single]])
        assert waiting == Counter({*lines, *seen[keys.single]})
        assert Counter(tenant for place in PLACES for tenant in seen[getattr(keys, place)]) == waiting
        # Every message is in one place.
        found = [each for tenant in lines for each in seen[keys.tenant(tenant)]]
        found += [single[8:].decode() for single in seen[keys.single].values()]
        found += [
            each for key in (keys.delayed, keys.discards, keys.blocked, keys.following) for each in seen[key]
        ]
        held = [tag.id for tags in self.held.values() for tag in tags]
        assert sorted(found + held) == sorted(seen[keys.messages])
        assert float(seen[keys.state].get("held", 0)) == len(held)
        # Slots are those of what is held.
        running = {tenant: RunningEntry.unpack(entry) for tenant, entry in seen[keys.running].items()}
        assert sum(each.slots for each in running.values()) <= len(held)
        assert all(tenant in waiting for tenant, each in running.items() if each.since_us)

    def teardown(self) -> None:
        """All that is left comes out, one consumer after the other dying for the last time."""
        if not hasattr(self, "held"):
            return
        for tenant in TENANTS:
            self.scripts.partition.set_quota(tenant, None).run(self.client)
            self.scripts.partition.resume(tenant).run(self.client)
        for consumer in CONSUMERS:
            self.kill(consumer)
        rounds, allowed = 0, {"leases", "wake", "verdicts", "dead", "dead_info", "dead_index", "limiter"}
        while left := self.scripts.left_over() - allowed:
            assert (rounds := rounds + 1) <= 2 * self.calls + 10, left
            self.fall_due()
            entries = self.scripts.claim(9, max_deliveries=MAX_DELIVERIES).entries
            assert self.scripts.finish(*[entry.tag for entry in entries]) == 0


@pytest.fixture
def client(redis_server: RedisServer, redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url, socket_timeout=None) as client:
        yield client


def test_a_tenant_with_waiting_messages_is_in_line(client: Any) -> None:
    machine = type("Machine", (StandingMachine,), {"client": client})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
        ),
    )


def test_a_tail_that_is_let_go_beside_a_message_that_came_back(client: Any) -> None:
    client.flushdb()
    scripts = PartitionScripts(client)

    def call(task_id: str) -> None:
        record = make_keyed_record("", "k", "", 0, replace=False, waiting=True)
        scripts.partition.push([OutgoingRecord(0, task_id, record)]).run(client)

    call("head")
    scripts.push("plain")
    head, _ = scripts.claim(2).entries
    call("tail")
    scripts.settle(head.tag)
    scripts.lose()
    assert scripts.reap() == 2  # the head is over, so its tail waits now, and the plain one waits again
    assert scripts.waiting() == ["plain", "tail"]
    assert scripts.take(2, suspects=False) == []
    assert scripts.take(2) == ["plain"]
    assert scripts.take(2) == ["tail"]
