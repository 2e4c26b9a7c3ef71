from __future__ import annotations

from celery_dq.lost_attempts import FIRST_PAUSE_S, MOST_LOSSES, LostAttempts


def test_losses_in_a_row_are_the_fault_of_the_message() -> None:
    attempts = LostAttempts()
    assert [attempts.lost() for _ in range(6)] == [False] * 5 + [True]
    assert MOST_LOSSES == 6


def test_a_broker_that_fails_in_between_is_the_reason_of_the_losses_before() -> None:
    attempts = LostAttempts()
    for _ in range(20):
        assert not any(attempts.lost() for _ in range(5))
        attempts.broker_failed()
    assert [attempts.lost() for _ in range(6)][-1]


def test_the_first_repetition_comes_at_once_and_the_others_take_their_time() -> None:
    attempts, pauses = LostAttempts(), []
    while not attempts.lost():
        pauses.append(attempts.pause_s)
    assert pauses == [0, 0.1, 0.2, 0.4, 0.8]
    assert FIRST_PAUSE_S == 0.1
    attempts.broker_failed()
    assert attempts.pause_s == 0
