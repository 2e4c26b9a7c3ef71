"""Trust counts from the time at which a write was sent, because its answer may be late."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from celery_dq.clock import ManualClock
from celery_dq.keys import PartitionKeys
from celery_dq.leadership.career import DOUBT, TRUST, Phase, Term
from celery_dq.leadership.elector import ElectionWon, LeaderElector
from celery_dq.leadership.redis_election import RedisElection

SESSION_S = 3.0
#: The answers come when the term is in doubt, just before the trust of the previous answer ends.
LATE_S = (DOUBT + 0.02) * SESSION_S


class LateElection(RedisElection):
    """An election whose clock advances between request and answer."""

    def __init__(self, client: Any, clock: ManualClock, late: Callable[[], bool]) -> None:
        super().__init__(client, PartitionKeys("online", "ledger"), "w", SESSION_S)
        self._clock, self._is_late = clock, late

    def accept(self, floor: int, since: float) -> ElectionWon:
        won = super().accept(floor, since)
        self._pass()
        return won

    def renew(self) -> None:
        super().renew()
        self._pass()

    def _pass(self) -> None:
        if self._is_late():
            self._clock.advance(LATE_S)


class Listener:
    """Records until when the term is trusted, and whether it was firm then."""

    def __init__(self) -> None:
        self.trusted: queue.Queue[tuple[float, bool]] = queue.Queue()

    def floor(self) -> int:
        return 0

    def serve(self, term: Term) -> None:
        term.inaugurated()
        term.wait()

    def trust(self, term: Term, until: float) -> None:
        self.trusted.put((until, term.is_firm or term.phase is Phase.INAUGURATING))

    def abort(self, term: Term) -> None:
        """Do nothing: no work runs."""


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    client = redis.Redis.from_url(redis_url)
    yield client
    client.close()


def test_an_election_is_trusted_from_the_sending_of_the_accession(client: Any) -> None:
    clock, listener = ManualClock(monotonic=1000.0), Listener()
    elector = LeaderElector(LateElection(client, clock, lambda: True), listener, clock=clock)
    elector.open()
    try:
        until, _ = listener.trusted.get(timeout=30)
        assert until == pytest.approx(1000.0 + TRUST * SESSION_S)
    finally:
        assert elector.close(30)


def test_a_term_is_trusted_from_the_sending_of_the_renewal(client: Any) -> None:
    clock, listener, late = ManualClock(monotonic=1000.0), Listener(), [False]
    elector = LeaderElector(LateElection(client, clock, lambda: late[0]), listener, clock=clock)
    elector.open()
    try:
        assert listener.trusted.get(timeout=30)[0] == pytest.approx(1000.0 + TRUST * SESSION_S)
        late[0] = True
        clock.advance(SESSION_S / 6)
        sent_at = clock.monotonic()
        until, was_firm = listener.trusted.get(timeout=30)
        assert until == pytest.approx(sent_at + TRUST * SESSION_S)
        assert not was_firm
    finally:
        late[0] = False
        assert elector.close(30)
