"""Requests of a leader that has lost its leadership are refused, and a blocked candidate lets others lead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import pytest
import redis

from celery_dq.errors import NotElected
from celery_dq.keys import PartitionKeys
from celery_dq.leadership.elector import Election, LeaderElector
from celery_dq.leadership.redis_election import RedisElection
from celery_dq.leadership.zookeeper_election import ZooKeeperElection
from celery_dq.testing.waiting import wait_until
from celery_dq.znodes import LeadershipNodes
from celery_dq.zookeeper.session import Session
from tests.leadership.election_harness import Work

NODES = LeadershipNodes("online", "ledger")
KEYS = PartitionKeys("online", "ledger")
#: Longer than a test.
SESSION_S = 60.0


class Place(NamedTuple):
    """A kind of election, and the changes that are made without the leader's knowledge."""

    candidate: Callable[[], Election]
    #: Raise the epoch as a later leader would, and leave the rest unchanged.
    raise_epoch: Callable[[Election], None]
    #: Let the term expire without another election.
    run_out: Callable[[Election], None]


@pytest.fixture(params=["zookeeper", "redis"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "redis":
        client: Any = redis.Redis.from_url(request.getfixturevalue("redis_url"))
        yield Place(
            lambda: RedisElection(client, KEYS, "w", SESSION_S),
            lambda election: client.hincrby(KEYS.leader, "token", 1),
            lambda election: client.hset(KEYS.leader, "until", 1),
        )
        client.close()
        return
    hosts = request.getfixturevalue("hosts")
    sessions: list[Session] = []
    looker = Session(hosts, timeout_s=SESSION_S)

    def candidate() -> Election:
        sessions.append(Session(hosts, timeout_s=SESSION_S))
        return ZooKeeperElection(sessions[-1], NODES, "w")

    def raise_epoch(election: Election) -> None:
        client = looker.open()
        client.set(NODES.epoch, client.get(NODES.epoch)[0])

    def run_out(election: Election) -> None:
        assert isinstance(election, ZooKeeperElection)
        looker.open().delete(NODES.candidate(election._node))

    yield Place(candidate, raise_epoch, run_out)
    for session in (*sessions, looker):
        session.close()


@pytest.mark.parametrize("ends", ["raise_epoch", "run_out"])
def test_a_term_that_is_over_for_the_server_is_not_renewed(place: Place, ends: str) -> None:
    leader = place.candidate()
    assert leader.become_candidate()
    leader.accept(0, 0.0)
    leader.renew()
    getattr(place, ends)(leader)
    for _ in range(2):
        with pytest.raises(NotElected):
            leader.renew()


def test_a_candidate_whose_node_is_gone_does_not_accede(hosts: str) -> None:
    with closing(Session(hosts, timeout_s=SESSION_S)) as session:
        election = ZooKeeperElection(session, NODES, "w")
        assert election.become_candidate()
        session.open().delete(NODES.candidate(election._node))
        with pytest.raises(NotElected):
            election.accept(0, 0.0)
        assert election.leader() is None


class Duties(Work):
    """Work that ends with its term; it may be unable to start."""

    def __init__(self, error: Exception | None = None, may_lead: bool = True) -> None:
        super().__init__()
        self.let_go.set()
        self.error = error
        self._may_lead = may_lead
        #: Attempts to lead.
        self.attempts = 0

    def may_lead(self) -> bool:
        self.attempts += 1
        return self._may_lead

    def floor(self) -> int:
        if self.error is not None:
            raise self.error
        return 0


#: Reasons why the first candidate in line cannot lead.
HINDRANCES = {
    "it may not": lambda: Duties(may_lead=False),
    "no broker": lambda: Duties(ConnectionError("the broker does not answer")),
    "a mistake": lambda: Duties(ValueError("no error of a server")),
}


@pytest.mark.logged_error("ValueError: no error of a server")
@pytest.mark.parametrize("hindrance", HINDRANCES)
def test_a_candidate_that_cannot_accede_gives_its_place_up(place: Place, hindrance: str) -> None:
    hindered = HINDRANCES[hindrance]()
    first = LeaderElector(place.candidate(), hindered, may_lead=hindered.may_lead)
    second = LeaderElector(place.candidate(), Duties())
    try:
        first.open()
        # Its candidacy in Redis lasts for less than a millisecond each time, so the attempts are counted.
        wait_until(lambda: hindered.attempts > 1)
        second.open()
        wait_until(lambda: second.term is not None and second.term.is_firm)
        assert first.term is None
    finally:
        assert first.close(30)
        assert second.close(30)
