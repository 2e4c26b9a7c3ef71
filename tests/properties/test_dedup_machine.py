"""The dedup machine against a list of events."""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from celery_dq.dedup.machine import DedupMachine, DedupState, Verdict

TIMEOUT = 10.0


class Histories(RuleBasedStateMachine):
    """Makes calls on one machine, and records the fate of each."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = DedupMachine()
        self.now = 0.0
        self.calls = 0
        self.tokens = 0
        self.waiting: list[str] = []  # in the order in which they must start; at most head, heir, tail
        self.running: tuple[str, int, float] | None = None
        self.heir: str | None = None
        self.stale: list[tuple[str, int]] = []
        self.served: dict[str, str] = {}  # declined or replaced call -> the call that covers it
        self.started_after: set[str] = set()

    def _new(self) -> str:
        self.calls += 1
        return f"c{self.calls}"

    @rule(replace=st.booleans(), waiting=st.sampled_from([0, 1]))
    def call(self, replace: bool, waiting: int) -> None:
        call = self._new()
        decision = self.machine.enqueue(call, policy="replace" if replace else "decline", waiting=waiting)
        others = [each for each in self.waiting if each != self.heir]
        if self.running is None and not self.waiting:
            assert (decision.verdict, decision.covering) == (Verdict.ACCEPT, call)
            self.waiting = [call]
        elif self.running is None:
            # A head that has not started covers; a tail may be there after a release.
            first, last = self.waiting[0], self.waiting[-1]
            if replace and first == last:
                assert (decision.verdict, decision.replaced) == (Verdict.ACCEPT, first)
                self.waiting[0] = call
                self.heir = None if self.heir == first else self.heir
            elif replace and last != self.heir:
                # The last run has the latest arguments.
                assert (decision.verdict, decision.replaced) == (Verdict.BLOCK, last)
                self.waiting[-1] = call
            elif replace and waiting:
                assert (decision.verdict, decision.replaced) == (Verdict.BLOCK, None)
                self.waiting.append(call)
            elif replace:
                assert (decision.verdict, decision.covering) == (Verdict.DECLINE, first)
            else:
                assert (decision.verdict, decision.covering) == (Verdict.DECLINE, first)
        elif others:
            if replace:
                assert (decision.verdict, decision.replaced) == (Verdict.BLOCK, others[-1])
                self.waiting[self.waiting.index(others[-1])] = call
            else:
                assert (decision.verdict, decision.covering) == (Verdict.DECLINE, others[-1])
        elif self.heir is not None and not replace:
            assert (decision.verdict, decision.covering) == (Verdict.DECLINE, self.heir)
        elif not waiting:
            assert (decision.verdict, decision.covering) == (Verdict.DECLINE, self.running[0])
            return
        else:
            assert (decision.verdict, decision.covering) == (Verdict.BLOCK, self.running[0])
            self.waiting.append(call)
        if decision.verdict is Verdict.DECLINE:
            # No lost update: the covering call has not read anything yet.
            assert decision.covering in self.waiting
        if decision.replaced is not None:
            assert decision.replaced not in self.waiting

    @precondition(lambda self: self.running is not None)
    @rule(honest=st.booleans())
    def retry(self, honest: bool) -> None:
        assert self.running is not None
        call, token, _ = self.running
        if not honest:
            token += 1000
        mine = self._new()
        before = (self.machine.heir, self.machine.tail)
        if honest and self.heir is None:
            decision = self.machine.enqueue(mine, continues=(call, token))
            assert decision.verdict is Verdict.ACCEPT
            self.heir = mine
            self.waiting.insert(0, mine)
        elif before != (None, None):
            assert self.machine.enqueue(mine, continues=(call, token)).verdict is Verdict.DECLINE

    @precondition(lambda self: self.running is None and self.waiting and self.heir is None)
    @rule()
    def retry_of_a_released_run(self) -> None:
        mine = self._new()
        assert self.machine.enqueue(mine, continues=(self.waiting[0], 0)).verdict is Verdict.ACCEPT
        self.waiting[0] = mine

    @precondition(lambda self: self.running is None and self.waiting)
    @rule()
    def start(self) -> None:
        self.tokens += 1
        first = self.waiting.pop(0)
        assert self.machine.start(first, self.tokens, self.now)
        assert not self.machine.start(first, self.tokens + 1, self.now)
        self.running = (first, self.tokens, self.now)
        if self.heir == first:
            self.heir = None

    @precondition(lambda self: self.running is not None)
    @rule()
    def finish(self) -> None:
        assert self.running is not None
        assert self.machine.dequeue(*self.running[:2])
        self.stale.append(self.running[:2])
        self.running = None

    @precondition(lambda self: self.running is not None)
    @rule()
    def release(self) -> None:
        assert self.running is not None
        assert self.machine.release(*self.running[:2])
        self.stale.append(self.running[:2])
        self.waiting.insert(0, self.running[0])
        self.running = None

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def come_too_late(self, data: st.DataObject) -> None:
        before = (self.machine.head, self.machine.heir, self.machine.tail)
        old = data.draw(st.sampled_from(self.stale))
        assert not self.machine.dequeue(*old)
        assert not self.machine.release(*old)
        assert before == (self.machine.head, self.machine.heir, self.machine.tail)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.waiting))
        assert self.machine.dequeue(call)
        assert not self.machine.dequeue(call)
        self.waiting.remove(call)
        if call == self.heir:
            self.heir = None

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        overdue = self.running is not None and self.now - self.running[2] >= TIMEOUT
        evicted = self.machine.evict(self.now, TIMEOUT)
        assert (evicted is not None) == overdue
        if evicted is not None and self.running is not None:
            assert (evicted.id, evicted.token) == self.running[:2]
            self.stale.append(self.running[:2])
            self.running = None

    @invariant()
    def agrees(self) -> None:
        machine = self.machine
        head = machine.head
        assert (head is not None and head.started) == (self.running is not None)
        known = [each.id for each in (machine.head, machine.heir, machine.tail) if each is not None]
        assert known == ([self.running[0]] if self.running else []) + self.waiting
        if head is None:
            assert machine.state is DedupState.INIT
        elif len(known) == 1:
            assert machine.state is DedupState.PROCESS
        else:
            assert machine.state is DedupState.BLOCK
        for late in (machine.heir, machine.tail):
            assert late is None or not late.started
        assert machine.token == self.tokens


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
