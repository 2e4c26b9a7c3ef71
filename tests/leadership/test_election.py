"""One suite for every way to hold an election, on real servers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from celery_dq.errors import NotElected
from celery_dq.leadership.election import Election
from celery_dq.leadership.zookeeper_election import ZooKeeperElection
from celery_dq.testing.waiting import wait_until
from celery_dq.znodes import LeadershipNodes
from celery_dq.zookeeper.session import Session, State
from tests.curator.expiry import expire
from tests.leadership.booth import SESSION_S, SHORT_S, Booth

T = TypeVar("T")


def elect(election: Election, floor: int = 0) -> int:
    wait_until(election.stand)
    return election.accede(floor, 0.0).token


def patiently(ask: Callable[[], T]) -> T:
    """Ask again, as an office does: a short session has little patience, and a busy machine answers late."""
    answers: list[T] = []

    def answered() -> bool:
        with contextlib.suppress(OSError):
            answers.append(ask())
        return bool(answers)

    wait_until(answered)
    return answers[0]


class TestElection:
    def test_one_of_two_is_elected(self, booth: Booth) -> None:
        first, second = booth.candidate(), booth.candidate()
        assert first.stand()
        won = first.accede(0, 12.5)
        assert won == (1, True, 0)
        assert not second.stand()
        leader = second.leader()
        assert leader is not None
        assert (leader.who, leader.token, leader.since) == (first.who, 1, 12.5)

    def test_tokens_grow_from_term_to_term_and_above_the_floor(self, booth: Booth) -> None:
        first, second = booth.candidate(), booth.candidate()
        assert elect(first) == 1
        first.resign(clean=True)
        assert elect(second, floor=40) == 41
        second.resign(clean=True)
        assert elect(first) == 42

    def test_renews_again_and_again(self, booth: Booth) -> None:
        first, second = booth.candidate(SHORT_S), booth.candidate()
        patiently(lambda: elect(first))
        over = threading.Event()
        deadline = threading.Timer(1.2 * SHORT_S, over.set)
        deadline.start()
        while not over.wait(SHORT_S / 6):
            patiently(first.renew)
            assert not second.stand()

    def test_a_resignation_wakes_the_next_one_at_once(self, booth: Booth) -> None:
        first, second = booth.candidate(), booth.candidate()
        elect(first)
        assert not second.stand()
        woken = threading.Event()

        def wait() -> None:
            second.wait(30)
            woken.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        first.resign(clean=True)
        assert woken.wait(SESSION_S / 2)
        waiter.join()
        assert second.stand()
        assert second.accede(0, 0.0) == (2, True, 0)

    def test_a_successor_knows_that_the_predecessor_did_not_hand_over(self, booth: Booth) -> None:
        first, second = booth.candidate(), booth.candidate()
        elect(first)
        first.resign(clean=False)
        assert wait_until(second.stand)
        assert second.accede(0, 0.0) == (2, False, 0)

    def test_a_dead_leader_is_replaced_when_its_session_ends(self, booth: Booth) -> None:
        first, second = booth.candidate(SHORT_S), booth.candidate()
        token = patiently(lambda: elect(first))
        assert not second.stand()
        booth.silence(first)
        wait_until(second.stand)
        assert second.accede(0, 0.0) == (token + 1, False, 0)

    def test_who_was_replaced_cannot_renew(self, booth: Booth) -> None:
        first, second = booth.candidate(), booth.candidate()
        elect(first)
        first.resign(clean=False)
        elect(second)
        with pytest.raises(NotElected):
            first.renew()
        assert second.leader() is not None
        second.renew()

    def test_who_was_replaced_resigns_without_harm(self, booth: Booth) -> None:
        first, second = booth.candidate(), booth.candidate()
        elect(first)
        first.resign(clean=True)
        elect(second)
        first.resign(clean=True)
        second.renew()

    def test_nobody_leads_after_a_clean_hand_over(self, booth: Booth) -> None:
        first = booth.candidate()
        assert first.leader() is None
        elect(first)
        first.resign(clean=True)
        assert first.leader() is None

    def test_a_candidate_is_told_of_a_former_term_of_its_own(self, booth: Booth) -> None:
        first = booth.candidate()
        elect(first)
        first.resign(clean=False)
        assert wait_until(first.stand)
        assert first.accede(0, 0.0) == (2, False, 1)

    def test_of_many_exactly_one_accedes(self, booth: Booth) -> None:
        candidates = [booth.candidate() for _ in range(5)]
        barrier = threading.Barrier(5)
        tokens: list[int] = []

        def run(election: Election) -> None:
            barrier.wait()
            try:
                if election.stand():
                    tokens.append(election.accede(0, 0.0).token)
            except NotElected:
                pass

        threads = [threading.Thread(target=run, args=(each,)) for each in candidates]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tokens == [1]


class TestZooKeeperElection:
    """What only this one can get wrong."""

    def one(self, hosts: str, timeout_s: float = 15.0) -> tuple[Session, ZooKeeperElection]:
        session = Session(hosts, timeout_s=timeout_s)
        return session, ZooKeeperElection(session, LeadershipNodes("online", "ledger"), "w")

    def test_a_lost_session_ends_the_candidacy(self, hosts: str) -> None:
        session, election = self.one(hosts)
        try:
            elect(election)
            expire(session)
            with pytest.raises(NotElected):
                election.renew()
            with pytest.raises(NotElected):
                election.accede(0, 0.0)
            assert elect(election) == 2
        finally:
            session.close()

    def test_a_short_disconnection_costs_no_leadership(self, hosts: str) -> None:
        session, election = self.one(hosts)
        try:
            elect(election)
            heard: list[tuple[State, bool]] = []
            # Looked at as it happens: it may be over at once.
            session.listen(lambda state: heard.append((state, election.suspended)))
            session.drop()
            wait_until(lambda: heard)
            with contextlib.suppress(OSError):
                election.renew()
            wait_until(lambda: len(heard) > 1)
            assert heard == [(State.SUSPENDED, True), (State.CONNECTED, False)]
            election.renew()
            assert election.leader() == (election.who, 1, 0.0)
        finally:
            session.close()

    def test_a_creation_without_an_answer_leaves_no_second_candidate(self, hosts: str) -> None:
        session, election = self.one(hosts)
        nodes = LeadershipNodes("online", "ledger")
        try:
            assert election.stand()
            # As if the answer had been lost: we do not know of our node.
            election._node = ""
            assert election.stand()
            assert len(session.open().get_children(nodes.candidates)) == 1
        finally:
            session.close()

    def test_only_the_next_one_in_line_is_woken(self, hosts: str) -> None:
        made = [self.one(hosts) for _ in range(3)]
        (_, first), (_, second), (_, third) = made
        try:
            elect(first)
            assert not second.stand()
            assert not third.stand()
            # Connecting wakes, too.
            assert not third.stand()
            first.renew()
            first.resign(clean=True)
            second.wait(30)
            assert second.stand()
            assert not third._changed.is_set()
        finally:
            for session, _ in made:
                session.close()

    def test_a_middle_one_that_leaves_promotes_nobody(self, hosts: str) -> None:
        made = [self.one(hosts) for _ in range(3)]
        (_, first), (_, second), (_, third) = made
        try:
            elect(first)
            assert not second.stand()
            assert not third.stand()
            second.resign(clean=False)
            third.wait(5)
            assert not third.stand()
        finally:
            for session, _ in made:
                session.close()
