"""The reports of the elector: when a renewal was sent, and whether a term ended with a hand-over.

The elections are real, in Redis, and their sessions are much longer than the tests. Only the clock of the
elector is simulated: it advances while a request is under way, as if its answer were late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from celery_dq.clock import ManualClock
from celery_dq.keys import PartitionKeys
from celery_dq.leadership.career import TRUST, Phase, Term
from celery_dq.leadership.election import ElectionWon
from celery_dq.leadership.elector import LeaderElector
from celery_dq.leadership.redis_election import RedisElection
from celery_dq.testing.waiting import wait_until

SESSION_S = 60.0
KEYS = PartitionKeys("online", "ledger")


class SlowElection(RedisElection):
    """An election with one late answer, by the clock of the elector."""

    clock: ManualClock
    late_s = 0.0
    bell: Callable[[], None]

    def add_listener(self, wake_event: Callable[[], None]) -> None:
        self.bell = wake_event

    def accept(self, floor: int, since: float) -> ElectionWon:
        won = super().accept(floor, since)
        late_s, self.late_s = self.late_s, 0.0
        self.clock.advance(late_s)
        return won

    def renew(self) -> None:
        super().renew()
        late_s, self.late_s = self.late_s, 0.0
        self.clock.advance(late_s)


class Hands:
    """Work that lasts until the term ends, and records until when the term was trusted."""

    def __init__(self) -> None:
        self.trusted_until: list[float] = []
        self.let_go = threading.Event()

    def floor(self) -> int:
        return 0

    def serve(self, term: Term) -> None:
        term.inaugurated()
        term.wait()
        self.let_go.wait(30)

    def trust(self, term: Term, until: float) -> None:
        self.trusted_until.append(until)

    def abort(self, term: Term) -> None:
        self.let_go.set()


class Led:
    """An elector during its term."""

    def __init__(self, client: Any) -> None:
        self.clock = ManualClock()
        self.hands = Hands()
        self.election = SlowElection(client, KEYS, "one", SESSION_S)
        self.election.clock = self.clock
        self.office = LeaderElector(self.election, self.hands, clock=self.clock)
        self.successor = RedisElection(client, KEYS, "two", SESSION_S)

    def term(self) -> Term:
        term = wait_until(lambda: self.office.term)
        assert term is not None
        wait_until(lambda: term.executed)
        return term


@pytest.fixture
def led(redis_url: str) -> Iterator[Led]:
    with redis.Redis.from_url(redis_url, socket_timeout=20) as client:
        led = Led(client)
        yield led
        led.hands.let_go.set()
        led.office.close(30)


def test_trust_counts_from_the_sending_of_the_write_that_won_the_election(led: Led) -> None:
    sent_at = led.clock.monotonic()
    led.election.late_s = 0.3 * SESSION_S
    led.office.open()
    term = led.term()
    assert led.hands.trusted_until[0] == pytest.approx(sent_at + TRUST * SESSION_S)
    assert term.token == 1


def test_trust_counts_from_the_sending_of_a_renewal(led: Led) -> None:
    led.office.open()
    led.term()
    led.clock.advance(1.0)
    sent_at = led.clock.monotonic()
    led.election.late_s = 0.3 * SESSION_S
    led.election.bell()
    wait_until(lambda: len(led.hands.trusted_until) > 1)
    assert led.hands.trusted_until[1] == pytest.approx(sent_at + TRUST * SESSION_S)


def test_a_renewal_whose_answer_comes_after_the_end_of_trust_renews_nothing(led: Led) -> None:
    led.office.open()
    term = led.term()
    led.election.late_s = TRUST * SESSION_S
    led.election.bell()
    wait_until(lambda: term.phase in (Phase.FALLEN, Phase.OVER))
    assert led.hands.let_go.wait(30)
    assert len(led.hands.trusted_until) == 1


@pytest.mark.parametrize("falls", [True, False], ids=["fallen", "resigned"])
def test_a_term_that_fell_is_not_reported_to_be_handed_over_in_good_order(led: Led, falls: bool) -> None:
    led.office.open()
    term = led.term()
    if falls:
        # No work runs any more when the elector reports the end, as after a resignation.
        led.clock.advance(TRUST * SESSION_S)
        assert term.phase is Phase.FALLEN
    else:
        led.hands.let_go.set()
        term.end("resigned")
    led.office.close(30)
    assert term.phase is Phase.OVER
    wait_until(led.successor.become_candidate)
    assert led.successor.accept(0, 0.0).clean is not falls
