from __future__ import annotations

import os

from hypothesis import given, strategies as st

from celery_dq.app.publishing.direct_stage import CircuitBreaker
from celery_dq.clock import ManualClock

DOWN = ConnectionRefusedError("refused")


def opened(clock: ManualClock) -> CircuitBreaker:
    breaker = CircuitBreaker(1, 2.0, clock)
    breaker.failed(DOWN, hung=False)
    return breaker


def test_it_opens_after_failures_in_a_row() -> None:
    breaker = CircuitBreaker(3, 2.0, ManualClock())
    for failed in (True, True, False, True, True):
        assert breaker.admit(1) == 0
        if failed:
            breaker.failed(DOWN, hung=False)
        else:
            breaker.succeeded()
    before = breaker.state
    breaker.failed(DOWN, hung=False)
    assert (before, breaker.state) == ("closed", "open")
    assert breaker.admit(1) == 2.0
    assert breaker.last_error == "refused"


def test_a_call_that_took_all_its_time_is_enough() -> None:
    breaker = CircuitBreaker(3, 2.0, ManualClock())
    breaker.failed(DOWN, hung=True)
    assert breaker.state == "open"


def test_zero_failures_never_open_it() -> None:
    breaker = CircuitBreaker(0, 2.0, ManualClock())
    for _ in range(10):
        breaker.failed(DOWN, hung=True)
    assert (breaker.state, breaker.admit(1)) == ("closed", 0)


def test_one_probe_goes_through_and_closes_it() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(2)
    assert breaker.state == "half-open"
    assert [breaker.admit(5) for _ in range(3)] == [0, 5, 5]
    breaker.succeeded()
    assert (breaker.state, breaker.admit(5), breaker.admit(5)) == ("closed", 0, 0)


def test_a_failed_probe_opens_it_again_before_so_many_calls_have_failed() -> None:
    clock = ManualClock()
    breaker = CircuitBreaker(5, 2.0, clock)
    breaker.failed(DOWN, hung=True)
    clock.advance(2)
    assert breaker.admit(5) == 0
    breaker.failed(DOWN, hung=False)
    assert (breaker.state, breaker.admit(5)) == ("open", 2.0)


def test_a_probe_without_an_outcome_lets_another_one_go() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(2)
    assert breaker.admit(5) == 0
    breaker.abstained()
    assert breaker.admit(5) == 0
    clock.advance(5)
    assert breaker.admit(5) == 0  # its thread was killed


def test_the_wall_clock_does_not_matter() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    for wall in (0.0, 4e9):
        clock.set_wall(wall)
        assert breaker.admit(5) == 2.0


def test_a_forked_child_begins_again() -> None:
    breaker = opened(ManualClock())
    with breaker._lock:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if breaker.admit(5) == 0 and breaker.state == "closed" else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert breaker.state == "open"


@given(st.lists(st.sampled_from(["ok", "fail", "hang", "abstain", "wait", "ask"]), max_size=60))
def test_it_is_never_shut_for_good(events: list[str]) -> None:
    clock = ManualClock()
    breaker = CircuitBreaker(2, 2.0, clock)
    for event in events:
        if event == "wait":
            clock.advance(1)
        elif event == "ask":
            breaker.admit(3)
        elif event == "ok":
            breaker.succeeded()
        elif event == "abstain":
            breaker.abstained()
        else:
            breaker.failed(DOWN, hung=event == "hang")
    clock.advance(3)
    assert breaker.admit(3) == 0
