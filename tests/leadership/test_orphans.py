"""What a candidate leaves behind when an answer was lost: nothing. And one who may not stand at all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from celery_dq.errors import ZooKeeperUnreachable
from celery_dq.leadership.office import Office
from celery_dq.leadership.zookeeper_election import ZooKeeperElection
from celery_dq.testing.waiting import wait_until
from celery_dq.znodes import LeadershipNodes
from celery_dq.zookeeper.session import Session

NODES = LeadershipNodes("online", "ledger")


class Deaf(Session):
    """Does what it is asked, and does not hear the answer when it is told to."""

    deaf_to = ""

    def ask(self, request: Callable[[Any], Any], timeout_s: float) -> Any:
        heard: list[str] = []

        class Listening:
            def __init__(self, client: Any) -> None:
                self._client = client

            def __getattr__(self, name: str) -> Any:
                heard.append(name)
                return getattr(self._client, name)

        answer = super().ask(lambda client: request(Listening(client)), timeout_s)
        if self.deaf_to and self.deaf_to in heard:
            self.deaf_to = ""
            raise ZooKeeperUnreachable("the answer is lost")
        return answer


@pytest.mark.parametrize("lost", ["create_async", "delete_async"])
def test_a_candidate_that_is_withdrawn_stands_in_nobodys_way(lost: str, hosts: str) -> None:
    ours, theirs = Deaf(hosts, timeout_s=30), Session(hosts, timeout_s=30)
    try:
        first = ZooKeeperElection(ours, NODES, "first")
        ours.deaf_to = lost
        if lost == "create_async":
            with pytest.raises(ZooKeeperUnreachable):
                first.stand()
        else:
            assert first.stand()
        # The session lives on: it serves other elections.
        try:
            first.resign(clean=False)
        except ZooKeeperUnreachable:
            first.resign(clean=False)
        assert ZooKeeperElection(theirs, NODES, "second").stand()
    finally:
        theirs.close()
        ours.close()


def test_nobody_waits_for_himself(hosts: str) -> None:
    """A creation without an answer, and a server that did not know of the node when it was asked for it."""
    session = Session(hosts, timeout_s=30)
    try:
        client = session.open()
        client.ensure_path(NODES.candidates)
        election = ZooKeeperElection(session, NODES, "first")
        prefix = NODES.candidate_prefix(election._guid)
        client.create(prefix, b'{"who": "first"}', ephemeral=True, sequence=True)
        sweep, election._sweep = election._sweep, lambda: None  # type: ignore[method-assign]
        assert election.stand()
        election._sweep = sweep  # type: ignore[method-assign]
        assert len(client.get_children(NODES.candidates)) == 1
        assert election.accede(0, 0.0).token == 1
    finally:
        session.close()


def test_a_session_forgets_who_has_withdrawn(hosts: str) -> None:
    session = Session(hosts, timeout_s=30)
    try:
        before = len(session._mine.listeners)
        for number in range(3):
            election = ZooKeeperElection(session, LeadershipNodes("online", f"queue-{number}"), "w")
            assert election.stand()
            election.resign(clean=False)
        assert len(session._mine.listeners) == before
    finally:
        session.close()


class NoDuties:
    """There is nothing to do."""

    def floor(self) -> int:
        return 0

    def serve(self, term: Any) -> None:
        term.wait()

    def trust(self, term: Any, until: float) -> None: ...

    def abort(self, term: Any) -> None: ...


def test_who_is_not_let_in_is_told_so_in_a_line(hosts: str, caplog: pytest.LogCaptureFixture) -> None:
    ours = Session(hosts, timeout_s=15, auth=[("digest", "shop:secret")])
    wrong = Session(hosts, timeout_s=15, auth=[("digest", "shop:wrong")])
    office = Office(ZooKeeperElection(wrong, NODES, "wrong"), NoDuties())
    try:
        ours.open()
        with caplog.at_level(logging.INFO, "celery_dq"):
            office.open()
            wait_until(lambda: "cannot be held" in caplog.text, 60)
        told = [record for record in caplog.records if "cannot be held" in record.message]
        assert "does not let us in there: check auth and sasl" in told[0].message
        assert told[0].exc_info is None
    finally:
        assert office.close(60)
        wrong.close()
        ours.close()
