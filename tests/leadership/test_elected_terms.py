"""The reports of the elector: when a renewal was sent, and whether a term ended with a hand-over.

The elections are real, in Redis, and their sessions are much longer than the tests. Only the clock of the
elector is simulated: it advances while a request is under way, as if its answer were late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from celery_dq.clock import ManualClock
from celery_dq.keys import PartitionKeys
from celery_dq.leadership.career import TRUST, Phase, Term
from celery_dq.leadership.elector import ElectionWon, LeaderElector
from celery_dq.leadership.redis_election import RedisElection
from celery_dq.testing.waiting import wait_until
from tests.leadership.election_harness import Work

SESSION_S = 60.0
KEYS = PartitionKeys("online", "ledger")


class SlowElection(RedisElection):
    """An election with one late answer, by the clock of the elector."""

    clock: ManualClock
    late_s = 0.0
    wake_event: Callable[[], None]

    def add_listener(self, wake_event: Callable[[], None]) -> None:
        self.wake_event = wake_event

    def accept(self, floor: int, since: float) -> ElectionWon:
        won = super().accept(floor, since)
        late_s, self.late_s = self.late_s, 0.0
        self.clock.advance(late_s)
        return won

    def renew(self) -> None:
        super().renew()
        late_s, self.late_s = self.late_s, 0.0
        self.clock.advance(late_s)


class Elected:
    """An elector during its term."""

    def __init__(self, client: Any) -> None:
        self.clock = ManualClock()
        self.hands = Work()
        self.election = SlowElection(client, KEYS, "one", SESSION_S)
        self.election.clock = self.clock
        self.elector = LeaderElector(self.election, self.hands, clock=self.clock)
        self.successor = RedisElection(client, KEYS, "two", SESSION_S)

    def term(self) -> Term:
        term = wait_until(lambda: self.elector.term)
        assert term is not None
        wait_until(lambda: term.executed)
        return term


@pytest.fixture
def elected(redis_url: str) -> Iterator[Elected]:
    with redis.Redis.from_url(redis_url, socket_timeout=20) as client:
        elected = Elected(client)
        yield elected
        elected.hands.let_go.set()
        elected.elector.close(30)


def test_trust_counts_from_the_sending_of_the_write_that_won_the_election(elected: Elected) -> None:
    sent_at = elected.clock.monotonic()
    elected.election.late_s = 0.3 * SESSION_S
    elected.elector.open()
    term = elected.term()
    assert elected.hands.trusted_until[0] == pytest.approx(sent_at + TRUST * SESSION_S)
    assert term.token == 1


def test_trust_counts_from_the_sending_of_a_renewal(elected: Elected) -> None:
    elected.elector.open()
    elected.term()
    elected.clock.advance(1.0)
    sent_at = elected.clock.monotonic()
    elected.election.late_s = 0.3 * SESSION_S
    elected.election.wake_event()
    wait_until(lambda: len(elected.hands.trusted_until) > 1)
    assert elected.hands.trusted_until[1] == pytest.approx(sent_at + TRUST * SESSION_S)


def test_a_renewal_whose_answer_comes_after_the_end_of_trust_renews_nothing(elected: Elected) -> None:
    elected.elector.open()
    term = elected.term()
    elected.election.late_s = TRUST * SESSION_S
    elected.election.wake_event()
    wait_until(lambda: term.phase in (Phase.FALLEN, Phase.OVER))
    assert elected.hands.let_go.wait(30)
    assert len(elected.hands.trusted_until) == 1


@pytest.mark.parametrize("falls", [True, False], ids=["fallen", "resigned"])
def test_a_term_that_fell_is_not_reported_to_be_handed_over_in_good_order(
    elected: Elected, falls: bool
) -> None:
    elected.elector.open()
    term = elected.term()
    if falls:
        # No work runs any more when the elector reports the end, as after a resignation.
        elected.clock.advance(TRUST * SESSION_S)
        assert term.phase is Phase.FALLEN
    else:
        elected.hands.let_go.set()
        term.end("resigned")
    elected.elector.close(30)
    assert term.phase is Phase.OVER
    wait_until(elected.successor.become_candidate)
    assert elected.successor.accept(0, 0.0).clean is not falls
