"""The rules of dedup as a state machine of hypothesis: calls arrive, run, end, die or arrive late.

The pure machine is the oracle of each step. The :class:`~tests.dedup.model.ledger.Ledger` compares the
promises with the events, without a machine. The implementation under test plugs in as a
:class:`~tests.dedup.model.driver.Driver`.
"""

from __future__ import annotations

import dataclasses
import sys

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from celery_dq.dedup.machine import Policy, Verdict
from tests.dedup.model.driver import KEYS, LEASE, Answer, Call
from tests.dedup.model.oracle import Oracle


class World(Oracle):
    """The steps of a story.

    The `fate` of a step is its crash point: the answer arrives; or it is lost, and the step is repeated; or
    the owner dies before the answer arrives. An owner may also die between any two steps.
    """

    # -- rules

    who = st.sampled_from([0, 1])
    fates = st.sampled_from(["answered"] * 6 + ["resent", "unanswered"])
    key_of = st.sampled_from([KEYS[0], KEYS[0], KEYS[0], KEYS[1]])
    #: Steps that end a story early are rare.
    seldom = st.sampled_from([False, False, False, True])

    def put(self, call: Call, fate: str) -> None:
        with self.looking(call.key, "ask"):
            reported = self.driver.ask(call)
            decision = self.decide(call)
            assert reported._replace(token=0) == Answer(
                decision.verdict, decision.covering, replaced=decision.replaced or ""
            )
            begins = self.stands(call.key).head == call.id
            assert bool(reported.token) == begins
            if decision.verdict is not Verdict.DECLINE:
                self.holds.setdefault(call.owner, []).append(call)
            if begins:
                self.started(call, reported.token)
        if fate == "resent":
            assert self.driver.ask(call)[:3] == reported[:3]
        self.meets(fate, call.owner)

    @rule(
        key=key_of,
        owner=who,
        policy=st.sampled_from(["decline", "decline", "replace"]),
        waiting=st.sampled_from([1, 1, 1, 0]),
        timeout=st.sampled_from([None, 6, 25]),
        fate=fates,
    )
    def ask(self, key: str, owner: int, policy: Policy, waiting: int, timeout: int | None, fate: str) -> None:
        self.count += 1
        task = f"t{self.count}"
        self.ledger.asks(task, key)
        self.put(Call(f"{task}/1", task, key, self.owners[owner], policy, waiting, timeout), fate)

    def once_more(self, call: Call, owner: str) -> Call:
        self.count += 1
        fresh = {"token": 0, "owner": owner, "id": f"{call.task}/{self.count}"}
        return dataclasses.replace(call, **fresh)  # type: ignore[arg-type]  # a dict of fields of two types

    @precondition(lambda self: self.to_ask)
    @rule(data=st.data(), owner=who, fate=fates)
    def redeliver(self, data: st.DataObject, owner: int, fate: str) -> None:
        call = data.draw(st.sampled_from(self.to_ask))
        self.to_ask.remove(call)
        self.put(self.once_more(call, self.owners[owner]), fate)

    @precondition(lambda self: self.held(running=True))
    @rule(data=st.data(), owner=who, fate=fates)
    def publish_retry(self, data: st.DataObject, owner: int, fate: str) -> None:
        """Celery publishes a retry, or a replacement, before it acknowledges the run."""
        call = data.draw(st.sampled_from(self.held(running=True)))
        self.put(self.once_more(call, self.owners[owner]), fate)

    @precondition(lambda self: self.held(running=False))
    @rule(data=st.data(), fate=fates)
    def start(self, data: st.DataObject, fate: str) -> None:
        self.look_whose_turn(data.draw(st.sampled_from(self.held(running=False))), fate)

    def look_whose_turn(self, call: Call, fate: str = "answered") -> None:
        with self.looking(call.key, "start"):
            standing = self.stands(call.key)
            reported = self.driver.start(call)
            assert (reported is not None) == (call.id in standing[:3])
            assert bool(reported) == (call.id == standing.head)
            if reported is not None:
                call.lease = self.now + LEASE if self.driver.leases else call.lease
            if reported:
                self.started(call, reported)
        if fate == "resent":
            assert self.driver.start(call) == reported
        if reported is None:
            self.forgets(call)
            self.loses_its_place(call)
        self.meets(fate, call.owner)

    def loses_its_place(self, call: Call) -> None:
        """End a wait without a run: a replaced call is covered, a call without a lease asks again."""
        if call.id not in self.replaced:
            self.redelivered(call)

    @precondition(lambda self: self.held(running=True))
    @rule(data=st.data(), fate=fates)
    def finish(self, data: st.DataObject, fate: str) -> None:
        """End a run, which may have been evicted or fenced before."""
        self.over(data.draw(st.sampled_from(self.held(running=True))), fate)

    def over(self, call: Call, fate: str = "answered") -> None:
        with self.looking(call.key, "leave"):
            expected = self.has_key(call)
            assert not self.driver.withdraw(call)
            assert self.driver.end(call, call.token) == expected
            if expected:
                self.machine(call.key).dequeue(call.id, call.token)
        if fate == "resent":
            assert not self.driver.end(call, call.token)
        self.forgets(call)
        self.ended(call, "done", expected)
        self.meets(fate, call.owner)

    def has_key(self, call: Call) -> bool:
        standing = self.stands(call.key)
        return (standing.head, standing.token) == (call.id, call.token)

    @precondition(lambda self: self.held(running=True))
    @rule(data=st.data(), fate=fates)
    def release(self, data: st.DataObject, fate: str) -> None:
        """Release a run that did not take place, or will be repeated: it waits in its place, untimed."""
        call = data.draw(st.sampled_from(self.held(running=True)))
        with self.looking(call.key, "leave"):
            expected = self.has_key(call)
            assert self.driver.release_call(call, call.token) == expected
            if expected:
                self.machine(call.key).release(call.id, call.token)
        if fate == "resent":
            assert not self.driver.release_call(call, call.token)
        self.ended(call, "released", expected)
        self.meets(fate, call.owner)

    @precondition(lambda self: self.held(running=False))
    @rule(data=st.data(), fate=fates)
    def cancel(self, data: st.DataObject, fate: str) -> None:
        call = data.draw(st.sampled_from(self.held(running=False)))
        with self.looking(call.key, "leave"):
            expected = call.id in self.stands(call.key)[:3]
            assert self.driver.withdraw(call) == expected
            if expected:
                assert self.machine(call.key).dequeue(call.id)
        if fate == "resent":
            assert not self.driver.withdraw(call)
        self.forgets(call)
        self.ledger.waits_no_more(call.id, call.key)
        self.ledger.excuses(call.task, "cancelled")
        self.meets(fate, call.owner)

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def come_too_late(self, data: st.DataObject) -> None:
        call, token = data.draw(st.sampled_from(self.stale))
        with self.looking(call.key, "leave"):
            assert not self.driver.end(call, token)
            assert not self.driver.release_call(call, token)
        with self.looking(call.key, "renew"):
            assert self.driver.renew(call.owner, [dataclasses.replace(call, token=token)]) == [False]

    @rule(owner=who)
    def renew(self, owner: int) -> None:
        calls = self.holds.get(self.owners[owner], [])
        expected = []
        for call in calls:
            with self.looking(call.key, "renew"):
                standing = self.stands(call.key)
                alive = call.id in standing[:3] and (not call.token or call.token == standing.token)
                expected.append(alive)
                if alive and self.driver.leases:
                    call.lease = self.now + LEASE
        assert self.driver.renew(self.owners[owner], calls) == expected

    @rule(key=key_of, sure=seldom)
    def free(self, key: str, sure: bool) -> None:
        """Remove all calls of a key, by an operator's order."""
        if sure:
            self.freed(key)

    def freed(self, key: str) -> None:
        for each in filter(None, self.stands(key)[:3]):
            self.falls(self.calls[each], "freed")
            self.to_wake.add((self.calls[each].owner, key))
        self.machines.pop(key, None)
        self.driver.free(key)

    @rule(owner=who, sure=seldom)
    def kill(self, owner: int, sure: bool) -> None:
        if sure:
            self.die(self.owners[owner])

    @rule(seconds=st.sampled_from([1, 4, 7, 12, 16]), awake=st.sampled_from([(), (), (0,), (1,), (0, 1)]))
    def time_passes(self, seconds: int, awake: tuple[int, ...] = ()) -> None:
        """Advance the clock. Owners that are awake renew in that time; the others are stopped, or cut off."""
        while seconds > 0:
            step = min(seconds, 4)
            seconds -= step
            self.now += step
            self.driver.at(self.now)
            for owner in awake:
                self.renew(owner)

    @precondition(lambda self: self.held(running=False))
    @rule(data=st.data())
    def fall_silent(self, data: st.DataObject) -> None:
        """Cut the owner of a waiting call off for longer than a lease, while the other owner continues."""
        owner = data.draw(st.sampled_from(self.held(running=False))).owner
        self.time_passes(LEASE + 2, tuple(n for n, each in enumerate(self.owners) if each != owner))

    @rule(sure=seldom)
    def forget_scripts(self, sure: bool) -> None:
        if sure:
            self.driver.forget_scripts()

    # -- invariants

    @invariant()
    def keys_match_the_machines(self) -> None:
        self.driver.look()
        for key in KEYS:
            assert self.driver.standing(key) == self.stands(key)
        reported = self.driver.woken_owners()
        assert reported is None or reported == self.to_wake
        self.to_wake.clear()
        claimed = [each for key in KEYS for each in self.stands(key)[:3] if each]
        self.driver.check([self.calls[each] for each in claimed])

    def teardown(self) -> None:
        # Further steps after a failed one would only hide the failure.
        if hasattr(self, "ledger") and sys.exc_info()[0] is None:
            type(self).closed += 1
            self.play_on()
            self.ledger.close()
            assert self.driver.left() == set()

    def play_on(self) -> None:
        for _ in range(200):
            if not (self.to_ask or any(self.holds.values())):
                break
            for call in self.held(running=True):
                self.over(call)
            for call in self.held(running=False):
                self.look_whose_turn(call)
            for call in self.to_ask[:]:
                self.to_ask.remove(call)
                self.put(self.once_more(call, self.owners[0]), "answered")
            self.time_passes(1)
            self.renew(0)
            self.renew(1)
            self.free_what_the_dead_hold()
        self.free_what_the_dead_hold()
        self.time_passes(LEASE + 1)
        for key in KEYS:
            with self.looking(key, "start"):
                assert self.driver.start(Call("newcomer", "", key, "w")) is None
        assert not self.to_ask
        assert not self.held(running=True) + self.held(running=False), "it does not come to an end"

    def free_what_the_dead_hold(self) -> None:
        """Free the calls of dead threads, which have no lease that ends."""
        if self.driver.leases:
            return
        for key in KEYS:
            owners = {self.calls[each].owner for each in self.stands(key)[:3] if each}
            if owners - set(self.owners):
                self.freed(key)
