"""Whatever comes back, ends or is passed over: who has something waiting is in line, and all of it comes out.

The machines of the other files know what each step does. This one knows only what must hold after any step,
so it may do everything together that they do one by one: keyed messages and plain ones of one tenant, claims
that pass over suspects, consumers that die or resign with settled and unsettled messages in hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from celery_dq.testing.servers import RedisServer
from celery_dq.transport.redis.replies import Outgoing, Tag
from tests.lua.desk import PLACES, Desk, make_keyed_record, make_quota, make_record

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
        self.desk = Desk(self.client)
        self.calls = 0
        self.plain: list[str] = []
        self.held: dict[str, list[Tag]] = {consumer: [] for consumer in CONSUMERS}
        self.push(batch)
        self.claim_all("c1", True)

    # -- producers

    @rule(batch=st.lists(calls, min_size=1, max_size=4))
    def push(self, batch: list[tuple[str, str, str, dict[str, bool]]]) -> None:
        outgoing = []
        for tenant, key, kind, options in batch:
            self.calls += 1
            now_us = self.desk.now_us()
            if key:
                record = make_keyed_record(
                    tenant, key, kind, now_us, **{"replace": False, "waiting": True, **options}
                )
            else:
                self.plain.append(f"m{self.calls}")
                due_us = now_us + 10**12 if kind == "delayed" else 0
                record = make_record(tenant, due_us=due_us, expires_us=kind == "expired")
            outgoing.append(Outgoing(0, f"m{self.calls}", record))
        self.desk.partition.push(outgoing).run(self.client)

    @rule()
    def fall_due(self) -> None:
        delayed = self.client.zrange(self.desk.keys.delayed, 0, -1)
        if delayed:
            self.client.zadd(self.desk.keys.delayed, dict.fromkeys(delayed, 1))

    # -- consumers

    def some(self, data: st.DataObject, consumer: str) -> list[Tag]:
        mine = self.held[consumer]
        return data.draw(st.lists(st.sampled_from(mine), max_size=4, unique=True)) if mine else []

    def let_go(self, consumer: str, tags: list[Tag]) -> None:
        self.held[consumer] = [tag for tag in self.held[consumer] if tag not in tags]

    @rule(consumer=consumers, suspects=st.booleans())
    def claim_all(self, consumer: str, suspects: bool) -> None:
        """The common case, more often than its share."""
        claimed = self.desk.claim(20, consumer, suspects=suspects, max_deliveries=MAX_DELIVERIES)
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
        claimed = self.desk.claim(
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
        assert self.desk.settle(*self.some(data, consumer), consumer=consumer) == 0

    @rule(data=st.data(), consumer=consumers)
    def finish(self, data: st.DataObject, consumer: str) -> None:
        tags = self.some(data, consumer)
        assert self.desk.finish(*tags, consumer=consumer) == 0
        self.let_go(consumer, tags)

    @rule(data=st.data(), consumer=consumers, mode=st.sampled_from(["unstarted", "requeue", "crashed"]))
    def release(self, data: st.DataObject, consumer: str, mode: str) -> None:
        tags = self.some(data, consumer)
        assert self.desk.release(*tags, mode=mode, consumer=consumer, max_deliveries=MAX_DELIVERIES) == 0
        self.let_go(consumer, tags)

    @rule(data=st.data(), consumer=consumers, more=st.lists(calls, max_size=3), dies=st.booleans())
    def take_all_and_go(
        self,
        data: st.DataObject,
        consumer: str,
        more: list[tuple[str, str, str, dict[str, bool]]],
        dies: bool,
    ) -> None:
        """A consumer takes what there is, further calls come, some of its tasks start, and it is gone."""
        self.claim_all(consumer, True)
        if more:
            self.push(more)
        self.settle_some(data, consumer)
        if dies:
            self.kill(consumer)
        else:
            assert self.desk.partition.resign(consumer).run(self.client) == 0
            self.held[consumer].clear()

    def kill(self, consumer: str) -> None:
        self.desk.lose(consumer)
        assert self.desk.reap(max_deliveries=MAX_DELIVERIES) == len(self.held[consumer])
        self.held[consumer].clear()

    @rule(data=st.data(), consumer=consumers)
    def take(self, data: st.DataObject, consumer: str) -> None:
        # A keyed one that is taken by name may still be replaced by a later call.
        ids = data.draw(st.lists(st.sampled_from(self.plain), max_size=2, unique=True)) if self.plain else []
        entries = self.desk.partition.take(consumer, ids, lease_ms=60_000).run(self.client)
        self.held[consumer] += [entry.tag for entry in entries]

    # -- operators

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ids = [f"m{data.draw(st.integers(1, self.calls))}" for _ in range(2)]
        self.desk.partition.cancel(ids, tombstone_ttl_ms=0).run(self.client)

    @rule(tenant=tenants)
    def cancel_tenant(self, tenant: str) -> None:
        self.desk.partition.cancel_tenant(tenant).run(self.client)

    @rule(tenant=tenants, key=st.sampled_from(["k", "l"]))
    def evict(self, tenant: str, key: str) -> None:
        self.desk.partition.evict(tenant, key).run(self.client)

    @rule(limit=st.integers(1, 4))
    def purge_a_few(self, limit: int) -> None:
        self.desk.partition.purge(limit=limit).run(self.client)

    @rule(tenant=tenants, quota=few_quotas)
    def set_quota(self, tenant: str, quota: bytes | None) -> None:
        self.desk.partition.set_quota(tenant, quota).run(self.client)

    # -- what must always hold

    def ids_in(self, key: str) -> list[str]:
        return [each.decode() for each in self.client.zrange(key, 0, -1)]

    @invariant()
    def who_has_something_waiting_stands_in_one_place(self) -> None:
        standing = Counter(
            tenant for place in PLACES for tenant in self.ids_in(getattr(self.desk.keys, place))
        )
        assert standing == Counter(tenant for tenant in TENANTS if self.desk.waiting(tenant))

    @invariant()
    def what_waits_is_in_one_form(self) -> None:
        keys = self.desk.keys
        for tenant in TENANTS:
            sole = self.client.hexists(keys.sole, tenant)
            assert not (sole and self.client.exists(keys.tenant(tenant)))

    @invariant()
    def every_message_is_in_one_place(self) -> None:
        keys = self.desk.keys
        found = [each for tenant in TENANTS for each in self.desk.waiting(tenant)]
        found += [each for key in (keys.delayed, keys.discards, keys.blocked) for each in self.ids_in(key)]
        found += [each.decode() for each in self.client.hkeys(keys.following)]
        found += [tag.id for tags in self.held.values() for tag in tags]
        assert len(found) == len(set(found))
        assert {each.decode() for each in self.client.hkeys(keys.messages)} == set(found)
        assert self.desk.state("held") == sum(map(len, self.held.values()))

    @invariant()
    def slots_are_those_of_what_is_held(self) -> None:
        running = sum(int(slots) for slots in self.client.hvals(self.desk.keys.running))
        assert running <= sum(map(len, self.held.values()))

    def teardown(self) -> None:
        """All that is left comes out, one consumer after the other dying for the last time."""
        if not hasattr(self, "held"):
            return
        for tenant in TENANTS:
            self.desk.partition.set_quota(tenant, None).run(self.client)
        for consumer in CONSUMERS:
            self.kill(consumer)
        for _ in range(2 * self.calls + 10):
            self.fall_due()
            entries = self.desk.claim(9, max_deliveries=MAX_DELIVERIES).entries
            assert self.desk.finish(*[entry.tag for entry in entries]) == 0
        left = self.desk.left_over()
        assert left <= {"leases", "wake", "verdicts", "dead", "dead_info", "dead_index", "limiter"}


@pytest.fixture
def client(redis_server: RedisServer, redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url, socket_timeout=None) as client:
        yield client


def test_who_has_something_waiting_is_in_line(client: Any) -> None:
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
    desk = Desk(client)

    def call(task_id: str) -> None:
        record = make_keyed_record("", "k", "", 0, replace=False, waiting=True)
        desk.partition.push([Outgoing(0, task_id, record)]).run(client)

    call("head")
    desk.push("plain")
    head, _ = desk.claim(2).entries
    call("tail")
    desk.settle(head.tag)
    desk.lose()
    assert desk.reap() == 2  # the head is over, so its tail waits now, and the plain one waits again
    assert desk.waiting() == ["plain", "tail"]
    assert desk.take(2, suspects=False) == []
    assert desk.take(2) == ["plain"]
    assert desk.take(2) == ["tail"]
