"""The invariants of a partition after every step of ``test_partition_model``, and at its end."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant

from celery_dq.inspector.claim_rates import RunningEntry
from celery_dq.inspector.queue_counters import COUNTER_FIELDS, QueueCounters
from tests.lua.partition_scripts import PartitionScripts
from tests.properties.partition_model import PLACES, Model

TENANTS = ("", "a", "ab", "b", "\u00ff:~")
#: Two sets have a resource in common.
SETS = ("any_of(a,b)", "any_of(ab,b)")
LINES = TENANTS + SETS
CONSUMERS = ("c1", "c2")


class WatchedPartition(RuleBasedStateMachine):
    """A partition and its model, once both have begun."""

    client: Any
    scripts: PartitionScripts
    model: Model
    #: The keys after the last step, and those of the hash ``state``.
    seen: Mapping[str, Mapping[str, Any]]
    state: Mapping[str, bytes]
    token_taken: bool
    #: Consumers that have a timer for their appointment.
    keeping: set[str]

    @invariant()
    def all_is_as_in_the_model(self) -> None:
        self.seen = self.scripts.snapshot()
        self.state = self.seen[self.scripts.keys.state]
        self.every_message_is_where_it_should_be()
        self.counts_are_exact()
        self.the_counters_of_the_state_add_up()
        self.tenants_stand_where_they_should()
        self.some_consumer_will_wake()

    def every_message_is_where_it_should_be(self) -> None:
        keys, model, seen = self.scripts.keys, self.model, self.seen
        waiting = {tenant: list(seen[keys.tenant(tenant)]) for tenant in LINES}
        for tenant, single in seen[keys.single].items():
            assert not waiting[tenant]
            waiting[tenant] = [single[8:].decode()]
        assert waiting == {t: [m.id for m in model.waiting.get(t, [])] for t in LINES}
        assert set(seen[keys.delayed]) == set(model.delayed)
        assert list(seen[keys.discards]) == [m.id for m in model.discards]
        assert seen[keys.discard_tags] == model.discard_tags
        held: list[str] = []
        for consumer in CONSUMERS:
            mine = model.held.get(consumer, {})
            assert {
                i: (struct.unpack(">d", e[:8])[0], e[24]) for i, e in seen[keys.held(consumer)].items()
            } == {i: (h.claim, h.message.settled + 2 * bool(h.message.reason)) for i, h in mine.items()}
            held += mine
        # In exactly one of them, and nothing accepted was lost.
        places = [*(i for ids in waiting.values() for i in ids), *model.delayed]
        places += [*(m.id for m in model.discards), *held]
        assert len(places) == len(set(places))
        assert set(seen[keys.messages]) == set(places) == set(model.messages)
        assert set(seen[keys.dead]) == set(seen[keys.dead_index]) == set(model.dead)
        assert float(self.state.get("held", 0)) == len(held)

    def counts_are_exact(self) -> None:
        keys, model, seen = self.scripts.keys, self.model, self.seen
        running = {tenant: RunningEntry.unpack(entry) for tenant, entry in seen[keys.running].items()}
        assert {t: e.slots for t, e in running.items()} == {
            t: n for t in TENANTS if (n := model.slots(t)) or t in model.claimed
        }
        assert {t: e.claimed for t, e in running.items() if e.since_us} == model.claimed
        crashes = {i: int(n) for i, n in seen[keys.deliveries].items()}
        assert crashes == {i: m.crashes for i, m in model.messages.items() if m.returned}
        reasons = {i: reason.decode() for i, reason in seen[keys.reasons].items()}
        assert reasons == {i: m.reason for i, m in model.messages.items() if m.reason}

    def the_counters_of_the_state_add_up(self) -> None:
        model = self.model
        counted = QueueCounters.read([self.state.get(name) for name in COUNTER_FIELDS])
        found = {name: value for name, value in vars(counted).items() if isinstance(value, int)}
        differing = {
            name: (value, model.counts[name]) for name, value in found.items() if value != model.counts[name]
        }
        assert not differing, f"counter: (broker, Model.counts): {differing}"
        ended = counted.finished + counted.discards_finished + counted.dropped
        assert counted.pushed + counted.replayed == len(model.messages) + ended

    def tenants_stand_where_they_should(self) -> None:
        keys, model, seen = self.scripts.keys, self.model, self.seen
        found = [(tenant, place) for place in PLACES for tenant in seen[getattr(keys, place)]]
        assert sorted(found) == sorted(model.place.items())
        assert set(seen[keys.resource_sets]) == set(model.rotations.sets)
        assert float(self.state.get("sets", 0)) == len(model.rotations.sets)
        found_rotations = {each: list(seen[keys.rotation(each)]) for each in TENANTS}
        assert found_rotations == {each: model.rotations.of.get(each, []) for each in TENANTS}
        assert set(seen[keys.pause_causes]) <= set(seen[keys.pause_ends]) <= set(seen[keys.pauses])
        assert seen[keys.turn] == pytest.approx(model.start)
        assert float(self.state.get("v", 0)) == pytest.approx(model.v)

    def some_consumer_will_wake(self) -> None:
        if self.scripts.token() or self.token_taken:
            return
        keys, seen = self.scripts.keys, self.seen
        assert not (self.model.discards)
        if self.model.queue_pauses:
            until = float(self.state.get("paused_until", 0))
            dues = [until] if until < 9e15 else []
        else:
            assert not (self.model.start)
            assert not (self.model.due())
            assert not any(self.model.pause_ends.values())
            dues = [
                due for key in (keys.delayed, keys.throttled, keys.pause_ends) for due in seen[key].values()
            ]
        if dues:
            now_us, owner = self.scripts.now_us(), self.state["next_look_owner"].decode()
            assert seen[keys.leases][owner] > now_us
            assert owner in self.keeping
            assert now_us < float(self.state["next_look"]) <= min(dues)

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        while self.scripts.partition.purge().run(self.client).more:
            pass
        for consumer in CONSUMERS:
            for message_id, each in list(self.model.held.get(consumer, {}).items()):
                assert (
                    self.scripts.partition.ack(consumer, finish=[(str(each.claim), message_id)]).run(
                        self.client
                    )
                    == 0
                )
        # Allow the times of slow rates, quotas and lasting records; no other key.
        allowed = {
            "leases",
            "quotas",
            "quota_info",
            "pauses",
            "pause_ends",
            "pause_causes",
            "limiter",
            "tombstones",
        }
        allowed |= {"dead", "dead_info", "dead_index"}
        allowed |= {f"reap_grace:{consumer}" for consumer in CONSUMERS}
        assert self.scripts.left_over() - allowed - {"producer:p", "wake"} == set()
