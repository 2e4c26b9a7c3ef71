"""A candidate leaves no nodes behind after a lost answer; and a candidate without access."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from celery_dq.errors import ZooKeeperUnreachable
from celery_dq.leadership.elector import LeaderElector
from celery_dq.leadership.zookeeper_election import (
    ZooKeeperElection,
    forget_leadership,
    leadership_names,
)
from celery_dq.testing.waiting import wait_until
from celery_dq.znodes import LeadershipNodes
from celery_dq.zookeeper.session import Session
from tests.leadership.election_harness import Work

NODES = LeadershipNodes("online", "ledger")


class Deaf(Session):
    """A session that carries out a request and loses its answer on demand."""

    deaf_to = ""
    #: Number of answers to lose.
    times = 1

    def ask(self, request: Callable[[Any], Any], timeout_s: float) -> Any:
        received: list[str] = []

        class Listening:
            def __init__(self, client: Any) -> None:
                self._client = client

            def __getattr__(self, name: str) -> Any:
                received.append(name)
                return getattr(self._client, name)

        answer = super().ask(lambda client: request(Listening(client)), timeout_s)
        if self.deaf_to and self.deaf_to in received:
            self.times -= 1
            if not self.times:
                self.deaf_to = ""
            raise ZooKeeperUnreachable("the answer is lost")
        return answer


@pytest.mark.parametrize("lost", ["create_async", "delete_async"])
def test_a_withdrawn_candidate_delays_no_other(lost: str, hosts: str) -> None:
    ours, theirs = Deaf(hosts, timeout_s=30), Session(hosts, timeout_s=30)
    with closing(ours), closing(theirs):
        first = ZooKeeperElection(ours, NODES, "first")
        ours.deaf_to = lost
        if lost == "create_async":
            with pytest.raises(ZooKeeperUnreachable):
                first.become_candidate()
        else:
            assert first.become_candidate()
        # The session lives on, because other elections use it.
        try:
            first.resign(clean=False)
        except ZooKeeperUnreachable:
            first.resign(clean=False)
        assert ZooKeeperElection(theirs, NODES, "second").become_candidate()


def test_two_lost_answers_in_a_row_leave_one_candidate(hosts: str) -> None:
    ours, theirs = Deaf(hosts, timeout_s=30), Session(hosts, timeout_s=30)
    with closing(ours), closing(theirs):
        first = ZooKeeperElection(ours, NODES, "first")
        ours.deaf_to, ours.times = "create_async", 2
        for _ in range(2):
            with pytest.raises(ZooKeeperUnreachable):
                first.become_candidate()
        assert first.become_candidate()
        assert len(theirs.open().get_children(NODES.candidates)) == 1
        assert first.accept(0, 0.0).token == 1
        # The first answer to the resignation and the answer to its repetition are lost.
        ours.deaf_to, ours.times = "transaction", 2
        for _ in range(2):
            with pytest.raises(ZooKeeperUnreachable):
                first.resign(clean=True)
        first.resign(clean=True)
        second = ZooKeeperElection(theirs, NODES, "second")
        assert second.become_candidate()
        assert second.accept(0, 0.0) == (2, True, 0)


def test_no_call_waits_for_itself(hosts: str) -> None:
    """A creation has lost its answer, and a server did not know the node at the first look."""
    with closing(Session(hosts, timeout_s=30)) as session:
        client = session.open()
        client.ensure_path(NODES.candidates)
        election = ZooKeeperElection(session, NODES, "first")
        prefix = NODES.candidate_prefix(election._guid)
        client.create(prefix, b'{"who": "first"}', ephemeral=True, sequence=True)
        sweep, election._sweep = election._sweep, lambda: None  # type: ignore[method-assign]
        assert election.become_candidate()
        election._sweep = sweep  # type: ignore[method-assign]
        assert len(client.get_children(NODES.candidates)) == 1
        assert election.accept(0, 0.0).token == 1


def test_a_session_forgets_a_withdrawn_candidate(hosts: str) -> None:
    with closing(Session(hosts, timeout_s=30)) as session:
        before = len(session._state.get().listeners)
        for number in range(3):
            election = ZooKeeperElection(session, LeadershipNodes("online", f"queue-{number}"), "w")
            assert election.become_candidate()
            election.resign(clean=False)
        assert len(session._state.get().listeners) == before


def test_a_leadership_without_a_leader_is_forgotten_once_its_candidates_are_gone(hosts: str) -> None:
    """The candidate could not read the fence of its queue, so no epoch was ever written."""
    with closing(Session(hosts, timeout_s=30)) as session:
        election = ZooKeeperElection(session, NODES, "w")
        assert election.become_candidate()
        forget_leadership(session, NODES)
        assert leadership_names(session, "online") == [NODES.name]
        election.resign(clean=False)
        forget_leadership(session, NODES)
        assert leadership_names(session, "online") == []
        # Once more, for a leadership that does not exist.
        forget_leadership(session, NODES)


def test_a_refused_login_is_logged_in_one_line(hosts: str, caplog: pytest.LogCaptureFixture) -> None:
    ours = Session(hosts, timeout_s=15, auth=[("digest", "shop:secret")])
    wrong = Session(hosts, timeout_s=15, auth=[("digest", "shop:wrong")])
    elector = LeaderElector(ZooKeeperElection(wrong, NODES, "wrong"), Work())
    try:
        ours.open()
        with caplog.at_level(logging.INFO, "celery_dq"):
            elector.open()
            wait_until(lambda: "cannot be held" in caplog.text, 60)
        reported = [record for record in caplog.records if "cannot be held" in record.message]
        assert "denied access to the node: check auth and sasl" in reported[0].message
        assert reported[0].exc_info is None
    finally:
        assert elector.close(60)
        wrong.close()
        ours.close()
