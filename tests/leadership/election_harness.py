"""Candidates for one leadership on real servers, with ZooKeeper or Redis."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import redis

from celery_dq.keys import PartitionKeys
from celery_dq.leadership.career import Term
from celery_dq.leadership.elector import Election
from celery_dq.leadership.redis_election import RedisElection
from celery_dq.leadership.zookeeper_election import ZooKeeperElection
from celery_dq.znodes import LeadershipNodes
from celery_dq.zookeeper.session import Session
from tests.chaos.proxy import Proxy

#: So long that no session expires and no answer is too late when the machine is stopped for a moment.
SESSION_S = 9.0
#: For a candidate whose session must expire during the test.
SHORT_S = 3.0


class Work:
    """The callbacks of an elector: work that lasts as long as its term, and then until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        #: Until when the term was trusted, at its start and after each renewal.
        self.trusted_until: list[float] = []

    def floor(self) -> int:
        return 0

    def serve(self, term: Term) -> None:
        term.inaugurated()
        term.wait()
        self.let_go.wait(60)

    def trust(self, term: Term, until: float) -> None:
        self.trusted_until.append(until)

    def abort(self, term: Term) -> None:
        self.let_go.set()


class Member(NamedTuple):
    election: Election
    silence: Callable[[], None]
    restore: Callable[[], None]
    close: Callable[[], None]


class ElectionHarness:
    """Candidates for one leadership; each one has its own connection, like a process."""

    def __init__(self, make: Callable[[str, float], Member]) -> None:
        self._make = make
        self._members: list[Member] = []

    def candidate(self, session_s: float = SESSION_S) -> Election:
        member = self._make(f"worker-{len(self._members)}", session_s)
        self._members.append(member)
        return member.election

    def silence(self, election: Election) -> None:
        """Cut the candidate off from its server."""
        next(member for member in self._members if member.election is election).silence()

    def heal(self) -> None:
        """Restore the connections of all candidates."""
        for member in self._members:
            member.restore()

    def close(self) -> None:
        self.heal()
        for member in self._members:
            member.close()


def zookeeper_elections(request: pytest.FixtureRequest) -> ElectionHarness:
    server = request.getfixturevalue("zookeeper")
    _, _, chroot = request.getfixturevalue("hosts").partition("/")

    def make(who: str, session_s: float) -> Member:
        proxy = Proxy(server.port).start()
        session = Session(f"127.0.0.1:{proxy.port}/{chroot}", timeout_s=session_s)

        def close() -> None:
            session.close()
            proxy.stop()

        election = ZooKeeperElection(session, LeadershipNodes("online", "ledger"), who)
        return Member(election, proxy.black_hole, proxy.restore, close)

    return ElectionHarness(make)


def redis_elections(request: pytest.FixtureRequest) -> ElectionHarness:
    server = request.getfixturevalue("redis_server")
    database = request.getfixturevalue("redis_url").rpartition("/")[2]
    queue = f"ledger-{uuid.uuid4().hex[:6]}"

    def make(who: str, session_s: float) -> Member:
        proxy = Proxy(server.port).start()
        client: Any = redis.Redis.from_url(
            f"redis://127.0.0.1:{proxy.port}/{database}", socket_timeout=session_s / 3
        )

        def close() -> None:
            client.close()
            proxy.stop()

        election = RedisElection(client, PartitionKeys("online", queue), who, session_s)
        return Member(election, proxy.black_hole, proxy.restore, close)

    return ElectionHarness(make)
