"""The rules of a term: examples, and a model of an ensemble with several contenders."""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from celery_dq.clock import ManualClock
from celery_dq.leadership.career import DOUBT, TRUST, Phase, Term

SESSION = 10.0


def a_term(clock: ManualClock, token: int = 1) -> Term:
    return Term("ledger", token, clock.monotonic(), SESSION, clock)


class TestTerm:
    def test_executes_only_after_the_inauguration(self) -> None:
        term = a_term(ManualClock())
        assert term.phase is Phase.INAUGURATING
        assert not term.is_firm
        assert term.inaugurated()
        assert term.is_firm

    def test_is_infirm_before_it_falls(self) -> None:
        clock = ManualClock()
        term = a_term(clock)
        term.inaugurated()
        clock.advance(SESSION * DOUBT)
        assert not term.is_firm
        assert term.is_trusted
        assert term.confirmed(clock.monotonic())
        assert term.is_firm

    def test_falls_for_good(self) -> None:
        clock = ManualClock()
        term = a_term(clock)
        term.inaugurated()
        clock.advance(SESSION * TRUST)
        assert term.phase is Phase.FALLEN
        assert not term.confirmed(clock.monotonic())
        assert not term.is_firm
        assert term.wait(0)
        assert "not confirmed" in term.reason

    def test_an_older_confirmation_takes_nothing_back(self) -> None:
        clock = ManualClock()
        term = a_term(clock)
        term.inaugurated()
        early = clock.monotonic()
        clock.advance(1)
        term.confirmed(clock.monotonic())
        term.confirmed(early)
        clock.advance(SESSION * DOUBT - 0.5)
        assert term.is_firm

    def test_a_broken_connection_makes_it_infirm_at_once(self) -> None:
        term = a_term(ManualClock())
        term.inaugurated()
        term.suspend(True)
        assert not term.is_firm
        assert term.is_trusted
        term.suspend(False)
        assert term.is_firm

    def test_steps_down_in_good_order(self) -> None:
        term = a_term(ManualClock())
        term.inaugurated()
        term.end("spread")
        assert (term.phase, term.is_trusted) == (Phase.HANDING_OVER, True)
        assert (term.is_firm, term.is_running) == (False, True)
        assert not term.inaugurated()
        term.close()
        assert not term.is_running
        assert term.phase is Phase.OVER
        assert term.reason == "spread"

    def test_a_message_taken_before_the_end_starts_without_a_doubt_or_not_at_all(self) -> None:
        clock = ManualClock()
        term = a_term(clock)
        assert (term.is_trusted, term.is_running) == (True, False)
        term.inaugurated()
        term.end("spread")
        clock.advance(SESSION * DOUBT)
        assert (term.is_trusted, term.is_running) == (True, False)
        term.confirmed(clock.monotonic())
        term.suspend(True)
        assert (term.is_trusted, term.is_running) == (True, False)
        term.suspend(False)
        assert (term.is_trusted, term.is_running) == (True, True)
        clock.advance(SESSION * TRUST)
        assert not term.is_running

    def test_reports_once_that_it_has_fallen(self) -> None:
        clock, reported = ManualClock(), list[Phase]()
        term = Term("ledger", 1, clock.monotonic(), SESSION, clock, lambda: reported.append(Phase.FALLEN))
        clock.advance(SESSION * TRUST)
        assert not reported  # the term has not been read since
        assert not term.is_trusted
        term.fall("again")
        term.close()
        assert reported == [Phase.FALLEN]

    def test_the_server_has_the_last_word(self) -> None:
        term = a_term(ManualClock())
        term.inaugurated()
        term.end("spread")
        term.fall("the candidate is gone")
        assert term.phase is Phase.FALLEN
        assert not term.is_trusted


class Contender:
    def __init__(self) -> None:
        self.term: Term | None = None
        self.renewals: list[float] = []
        self.answered_at = 0.0
        self.session_alive = False


class Ensemble(RuleBasedStateMachine):
    """Contenders with delayed and lost messages, and a server that expires silent sessions.

    The invariant: two contenders never may start work at the same time, and the contender that may start work
    has the highest token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.contenders = [Contender() for _ in range(3)]
        self.leader: Contender | None = None
        self.epoch = 0

    who = st.integers(0, 2)

    @rule(seconds=st.floats(0.01, SESSION))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        leader = self.leader
        # The server may expire a session late, but never early.
        if leader is not None and self.clock.monotonic() - leader.answered_at > SESSION:
            self.leader = None

    @precondition(lambda self: self.leader is None)
    @rule(who=who, travel=st.floats(0, SESSION / 6))
    def is_elected(self, who: int, travel: float) -> None:
        contender = self.contenders[who]
        if contender.term is not None and contender.term.phase is not Phase.OVER:
            contender.term.close()
        sent_at = self.clock.monotonic()
        self.clock.advance(travel)
        self.epoch += 1
        self.leader, contender.answered_at = contender, self.clock.monotonic()
        contender.renewals = []
        contender.term = Term("ledger", self.epoch, sent_at, SESSION, self.clock)

    @rule(who=who)
    def is_inaugurated(self, who: int) -> None:
        term = self.contenders[who].term
        if term is not None:
            term.inaugurated()

    @rule(who=who, reaches=st.booleans())
    def sends_a_renewal(self, who: int, reaches: bool) -> None:
        contender = self.contenders[who]
        sent_at = self.clock.monotonic()
        if reaches and self.leader is contender:
            contender.answered_at = sent_at
            contender.renewals.append(sent_at)

    @rule(who=who)
    def receives_renewal(self, who: int) -> None:
        contender = self.contenders[who]
        if contender.renewals and contender.term is not None:
            contender.term.confirmed(contender.renewals.pop(0))

    @rule(who=who)
    def steps_down(self, who: int) -> None:
        contender = self.contenders[who]
        if contender.term is not None:
            contender.term.end("stepped down")
            if self.leader is contender:
                contender.term.close()
                self.leader = None

    @invariant()
    def at_most_one_may_start(self) -> None:
        terms = [each.term for each in self.contenders if each.term is not None]
        may_start = [term for term in terms if term.is_firm or term.is_running]
        assert len(may_start) <= 1
        assert all(term.token == self.epoch for term in may_start)

    @invariant()
    def at_most_one_is_trusted(self) -> None:
        trusted = [each.term for each in self.contenders if each.term is not None and each.term.is_trusted]
        assert len(trusted) <= 1


TestEnsemble = Ensemble.TestCase
TestEnsemble.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
