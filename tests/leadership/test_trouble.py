"""The elector survives any error of its server, and leaves no candidate behind."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_dq.keys import PartitionKeys
from celery_dq.leadership.career import Phase, Term
from celery_dq.leadership.elector import LeaderElector
from celery_dq.leadership.redis_election import RedisElection
from celery_dq.testing.processes import dead_port
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.leadership.election_harness import Work

SESSION_S = 3.0


class Hands(Work):
    """Work that tells whether it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = threading.Event()

    def serve(self, term: Term) -> None:
        term.inaugurated()
        self.runs.set()
        try:
            term.wait(60)
            self.let_go.wait(60)
        finally:
            self.runs.clear()


@pytest.fixture
def own_redis() -> Any:
    with RedisServer() as server:
        yield server


@pytest.fixture
def dead_redis_port() -> Iterator[int]:
    with dead_port() as port:
        yield port


def make_elector(server: RedisServer, who: str, hands: Hands) -> LeaderElector:
    client = redis.Redis.from_url(server.url(), socket_timeout=SESSION_S / 3)
    return LeaderElector(RedisElection(client, PartitionKeys("online", "ledger"), who, SESSION_S), hands)


def test_a_renewal_that_is_answered_with_an_error_makes_no_second_leader(
    own_redis: RedisServer, dead_redis_port: int
) -> None:
    """A server that has become a replica refuses the renewal; a moment later, it is the primary again."""
    first, second = Hands(), Hands()
    electors = [make_elector(own_redis, "one", first), make_elector(own_redis, "two", second)]
    admin = redis.Redis.from_url(own_redis.url())
    both = []
    try:
        electors[0].open()
        wait_until(first.runs.is_set, 30)
        electors[1].open()
        term = electors[0].term
        assert term is not None
        admin.replicaof("127.0.0.1", dead_redis_port)
        wait_until(lambda: not term.is_firm or electors[0].term is not term, 30)
        admin.replicaof("no", "one")
        until = time.monotonic() + SESSION_S
        while time.monotonic() < until:
            both.append(first.runs.is_set() and second.runs.is_set())
            time.sleep(0.01)  # between two checks for a state that must never occur
        assert not any(both), "two terms are served at the same time"
        # In the end there is a leader, because no elector has died of the error.
        first.let_go.set()
        wait_until(lambda: any(each.term is not None and each.term.is_firm for each in electors), 30)
        assert all(each._thread is not None and each._thread.is_alive() for each in electors)
        # The term has survived the errors, or it is over.
        assert electors[0].term is term or term.phase is Phase.OVER
    finally:
        admin.replicaof("no", "one")
        for hands in (first, second):
            hands.let_go.set()
        for each in electors:
            each.close(30)


@pytest.mark.logged_error("The callback that stops the work in the term")
def test_a_task_that_calls_exit_when_the_term_falls_leaves_a_candidate(own_redis: RedisServer) -> None:
    """sys.exit() ends only its thread; without a handler, the candidate would stay in the line."""

    class Leaving(Hands):
        def abort(self, term: Term) -> None:
            super().abort(term)
            sys.exit("this does not end the process")

    hands = Leaving()
    only = make_elector(own_redis, "only", hands)
    try:
        only.open()
        wait_until(hands.runs.is_set, 30)
        term = only.term
        assert term is not None
        redis.Redis.from_url(own_redis.url()).delete(PartitionKeys("online", "ledger").leader)
        wait_until(lambda: term.phase is Phase.OVER, 30)
        wait_until(lambda: only.term not in (None, term), 30)
    finally:
        hands.let_go.set()
        only.close(30)


def test_a_candidate_without_its_server_logs_one_line(
    dead_redis_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    # The client's own retries would take seconds for each attempt.
    client = redis.Redis(port=dead_redis_port, socket_timeout=1.0, retry=Retry(NoBackoff(), 0))
    election = RedisElection(client, PartitionKeys("online", "q"), "w1", SESSION_S)
    resign, asked = election.resign, list[bool]()

    def counted(clean: bool) -> None:
        asked.append(clean)
        resign(clean)

    # Each further attempt begins with the pending resignation.
    election.resign = counted  # type: ignore[method-assign]
    elector = LeaderElector(election, Hands())
    elector.open()
    wait_until(lambda: len(asked) >= 3, 100)
    assert len([each for each in caplog.messages if each.startswith("The election for 'q'")]) == 1
    elector.close(30)
    client.close()
