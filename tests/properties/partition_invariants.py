"""The invariants of a partition after every step of ``test_partition_model``, and at its end."""

from __future__ import annotations

import struct
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
    token_taken: bool
    #: Consumers that have a timer for their appointment.
    keeping: set[str]

    def ids_in(self, key: str) -> list[str]:
        return [each.decode() for each in self.client.zrange(key, 0, -1)]

    @invariant()
    def every_message_is_where_it_should_be(self) -> None:
        keys, model = self.scripts.keys, self.model
        waiting = {tenant: self.scripts.waiting(tenant) for tenant in LINES}
        assert waiting == {t: [m.id for m in model.waiting.get(t, [])] for t in LINES}
        assert set(self.ids_in(keys.delayed)) == set(model.delayed)
        assert self.ids_in(keys.discards) == [m.id for m in model.discards]
        tags = self.client.zrange(keys.discard_tags, 0, -1, withscores=True)
        assert {tenant.decode(): tag for tenant, tag in tags} == model.discard_tags
        held: list[str] = []
        for consumer in CONSUMERS:
            entries = self.client.hgetall(keys.held(consumer))
            mine = model.held.get(consumer, {})
            assert {i.decode(): (struct.unpack(">d", e[:8])[0], e[24]) for i, e in entries.items()} == {
                i: (h.claim, h.message.settled + 2 * bool(h.message.reason)) for i, h in mine.items()
            }
            held += mine
        # In exactly one of them, and nothing accepted was lost.
        places = [*(i for ids in waiting.values() for i in ids), *model.delayed]
        places += [*(m.id for m in model.discards), *held]
        assert len(places) == len(set(places))
        assert {i.decode() for i in self.client.hkeys(keys.messages)} == set(places) == set(model.messages)
        assert {i.decode() for i in self.client.hkeys(keys.dead)} == set(model.dead)
        assert set(self.ids_in(keys.dead_index)) == set(model.dead)
        assert self.scripts.state("held") == len(held)

    @invariant()
    def counts_are_exact(self) -> None:
        keys, model = self.scripts.keys, self.model
        running = {t.decode(): RunningEntry.unpack(n) for t, n in self.client.hgetall(keys.running).items()}
        assert {t: e.slots for t, e in running.items()} == {
            t: n for t in TENANTS if (n := model.slots(t)) or t in model.claimed
        }
        assert {t: e.claimed for t, e in running.items() if e.since_us} == model.claimed
        crashes = {i.decode(): int(n) for i, n in self.client.hgetall(keys.deliveries).items()}
        assert crashes == {i: m.crashes for i, m in model.messages.items() if m.returned}
        reasons = {i.decode(): r.decode() for i, r in self.client.hgetall(keys.reasons).items()}
        assert reasons == {i: m.reason for i, m in model.messages.items() if m.reason}

    @invariant()
    def the_counters_of_the_state_add_up(self) -> None:
        keys, model = self.scripts.keys, self.model
        counted = QueueCounters.read(self.client.hmget(keys.state, COUNTER_FIELDS))
        found = {name: value for name, value in vars(counted).items() if isinstance(value, int)}
        differing = {
            name: (value, model.counts[name]) for name, value in found.items() if value != model.counts[name]
        }
        assert not differing, f"counter: (broker, Model.counts): {differing}"
        ended = counted.finished + counted.discards_finished + counted.dropped
        assert counted.pushed + counted.replayed == len(model.messages) + ended

    @invariant()
    def tenants_stand_where_they_should(self) -> None:
        found: dict[str, str] = {}
        for place in PLACES:
            for tenant in self.ids_in(getattr(self.scripts.keys, place)):
                assert tenant not in found
                found[tenant] = place
        assert found == self.model.place
        keys, rotations = self.scripts.keys, self.model.rotations
        assert set(self.ids_in(keys.resource_sets)) == set(rotations.sets)
        assert self.scripts.state("sets") == len(rotations.sets)
        found_rotations = {each: self.ids_in(keys.rotation(each)) for each in TENANTS}
        assert found_rotations == {each: rotations.of.get(each, []) for each in TENANTS}
        turn = self.client.zrange(self.scripts.keys.turn, 0, -1, withscores=True)
        assert {t.decode(): tag for t, tag in turn} == pytest.approx(self.model.start)
        assert self.scripts.state("v") == pytest.approx(self.model.v)

    @invariant()
    def some_consumer_will_wake(self) -> None:
        assert self.client.llen(self.scripts.keys.wake) <= 1
        if self.token_taken or self.scripts.token():
            return
        keys = self.scripts.keys
        assert not (self.model.discards)
        if self.model.queue_pauses:
            until = self.scripts.state("paused_until")
            dues = [until] if until < 9e15 else []
        else:
            assert not (self.model.start)
            assert not (self.model.due())
            assert not any(self.model.pause_ends.values())
            dues = [
                score
                for key in (keys.delayed, keys.throttled, keys.pause_ends)
                for _, score in self.client.zrange(key, 0, 0, withscores=True)
            ]
        if dues:
            state = self.client.hgetall(self.scripts.keys.state)
            assert (
                self.client.zscore(self.scripts.keys.leases, state[b"next_look_owner"])
                > self.scripts.now_us()
            )
            assert state[b"next_look_owner"].decode() in self.keeping
            assert self.scripts.now_us() < float(state[b"next_look"]) <= min(dues)

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
        allowed = {"leases", "quotas", "quota_info", "pauses", "pause_ends", "limiter", "tombstones"}
        allowed |= {"dead", "dead_info", "dead_index"}
        allowed |= {f"reap_grace:{consumer}" for consumer in CONSUMERS}
        assert self.scripts.left_over() - allowed - {"producer:p", "wake"} == set()
