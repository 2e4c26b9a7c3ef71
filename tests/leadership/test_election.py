"""One suite for all implementations of an election, on real servers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import TypeVar

import pytest

from celery_dq.errors import NotElected
from celery_dq.leadership.elector import Election
from celery_dq.leadership.zookeeper_election import ZooKeeperElection
from celery_dq.testing.waiting import wait_until
from celery_dq.znodes import LeadershipNodes
from celery_dq.zookeeper.session import Session, SessionState
from tests.children import in_threads
from tests.curator.expiry import break_connection, expire
from tests.leadership.election_harness import SESSION_S, SHORT_S, ElectionHarness

T = TypeVar("T")
Candidates = list[tuple[Session, ZooKeeperElection]]
NODES = LeadershipNodes("online", "ledger")


def elect(election: Election, floor: int = 0) -> int:
    wait_until(election.become_candidate)
    return election.accept(floor, 0.0).token


def patiently(ask: Callable[[], T]) -> T:
    """Repeat a request like an elector, because a short session has a short timeout."""
    answers: list[T] = []

    def answered() -> bool:
        with contextlib.suppress(OSError):
            answers.append(ask())
        return bool(answers)

    wait_until(answered)
    return answers[0]


class TestElection:
    def test_one_of_two_is_elected(self, elections: ElectionHarness) -> None:
        first, second = elections.candidate(), elections.candidate()
        assert first.become_candidate()
        won = first.accept(0, 12.5)
        assert won == (1, True, 0)
        assert not second.become_candidate()
        leader = second.leader()
        assert leader is not None
        assert (leader.who, leader.token, leader.since) == (first.who, 1, 12.5)

    def test_tokens_grow_from_term_to_term_and_above_the_floor(self, elections: ElectionHarness) -> None:
        first, second = elections.candidate(), elections.candidate()
        assert elect(first) == 1
        first.resign(clean=True)
        assert elect(second, floor=40) == 41
        second.resign(clean=True)
        assert elect(first) == 42

    def test_a_former_leader_comes_behind_the_other_candidates(self, elections: ElectionHarness) -> None:
        first, second = elections.candidate(), elections.candidate()
        elect(first)
        assert not second.become_candidate()
        first.resign(clean=True)
        assert not first.become_candidate()
        assert second.leader() is None
        elect(second)

    def test_a_former_leader_is_elected_again_if_no_other_one_comes(self, elections: ElectionHarness) -> None:
        first, second = elections.candidate(), elections.candidate(SHORT_S)
        elect(first)
        second.become_candidate()
        first.resign(clean=True)
        elections.silence(second)
        assert elect(first) == 2

    def test_renews_again_and_again(self, elections: ElectionHarness) -> None:
        first, second = elections.candidate(SHORT_S), elections.candidate()
        patiently(lambda: elect(first))
        over = threading.Event()
        deadline = threading.Timer(1.2 * SHORT_S, over.set)
        deadline.start()
        while not over.wait(SHORT_S / 6):
            patiently(first.renew)
            assert not second.become_candidate()

    def test_a_resignation_wakes_the_next_one_at_once(self, elections: ElectionHarness) -> None:
        first, second = elections.candidate(), elections.candidate()
        elect(first)
        assert not second.become_candidate()
        woken = threading.Event()

        def wait() -> None:
            second.wait(30)
            woken.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        first.resign(clean=True)
        assert woken.wait(SESSION_S / 2)
        waiter.join()
        assert second.become_candidate()
        assert second.accept(0, 0.0) == (2, True, 0)

    def test_a_successor_knows_that_the_predecessor_did_not_hand_over(
        self, elections: ElectionHarness
    ) -> None:
        first, second = elections.candidate(), elections.candidate()
        elect(first)
        first.resign(clean=False)
        assert wait_until(second.become_candidate)
        assert second.accept(0, 0.0) == (2, False, 0)

    def test_a_dead_leader_is_replaced_when_its_session_ends(self, elections: ElectionHarness) -> None:
        former, first, second = elections.candidate(), elections.candidate(SHORT_S), elections.candidate()
        # The hand-over of that term does not concern the terms after it.
        elect(former)
        former.resign(clean=True)
        token = patiently(lambda: elect(first))
        assert not second.become_candidate()
        elections.silence(first)
        wait_until(second.become_candidate)
        assert second.accept(0, 0.0) == (token + 1, False, 0)

    def test_a_replaced_leader_cannot_renew(self, elections: ElectionHarness) -> None:
        first, second = elections.candidate(), elections.candidate()
        elect(first)
        first.resign(clean=False)
        elect(second)
        with pytest.raises(NotElected):
            first.renew()
        assert second.leader() is not None
        second.renew()

    def test_a_replaced_leader_resigns_without_harm(self, elections: ElectionHarness) -> None:
        first, second = elections.candidate(), elections.candidate()
        elect(first)
        first.resign(clean=True)
        elect(second)
        first.resign(clean=True)
        second.renew()

    def test_no_worker_leads_after_a_clean_hand_over(self, elections: ElectionHarness) -> None:
        first = elections.candidate()
        assert first.leader() is None
        elect(first)
        first.resign(clean=True)
        assert first.leader() is None

    def test_a_candidate_is_reported_of_a_former_term_of_its_own(self, elections: ElectionHarness) -> None:
        first = elections.candidate()
        elect(first)
        first.resign(clean=False)
        assert wait_until(first.become_candidate)
        assert first.accept(0, 0.0) == (2, False, 1)

    def test_of_many_exactly_one_accedes(self, elections: ElectionHarness) -> None:
        candidates = [elections.candidate() for _ in range(5)]
        barrier = threading.Barrier(5)
        tokens: list[int] = []

        def run(election: Election) -> None:
            barrier.wait()
            with contextlib.suppress(NotElected):
                if election.become_candidate():
                    tokens.append(election.accept(0, 0.0).token)

        in_threads(*(partial(run, each) for each in candidates))
        assert tokens == [1]


@pytest.fixture
def candidates(hosts: str) -> Iterator[Candidates]:
    """Three candidates, each with a session."""
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(closing(Session(hosts, timeout_s=15))) for _ in range(3)]
        yield [(each, ZooKeeperElection(each, NODES, "w")) for each in sessions]


class TestZooKeeperElection:
    """Properties of this implementation alone."""

    def test_a_lost_session_ends_the_candidacy(self, candidates: Candidates) -> None:
        session, election = candidates[0]
        elect(election)
        expire(session)
        with pytest.raises(NotElected):
            election.renew()
        with pytest.raises(NotElected):
            election.accept(0, 0.0)
        assert elect(election) == 2

    def test_a_short_disconnection_costs_no_leadership(self, candidates: Candidates) -> None:
        session, election = candidates[0]
        elect(election)
        received: list[tuple[SessionState, bool]] = []
        # Recorded in the callback, because the state may be short.
        session.add_listener(lambda state: received.append((state, election.suspended)))
        break_connection(session)
        wait_until(lambda: received)
        with contextlib.suppress(OSError):
            election.renew()
        wait_until(lambda: len(received) > 1)
        assert received == [(SessionState.SUSPENDED, True), (SessionState.CONNECTED, False)]
        election.renew()
        assert election.leader() == (election.who, 1, 0.0)

    def test_a_creation_without_an_answer_leaves_no_second_candidate(self, candidates: Candidates) -> None:
        session, election = candidates[0]
        assert election.become_candidate()
        # As after a creation with a lost answer, the name of the node is unknown.
        election._node = ""
        assert election.become_candidate()
        assert len(session.open().get_children(NODES.candidates)) == 1

    def test_only_the_next_one_in_line_is_woken(self, candidates: Candidates) -> None:
        (_, first), (_, second), (_, third) = candidates
        elect(first)
        assert not second.become_candidate()
        assert not third.become_candidate()
        # A new connection wakes the candidate, too.
        assert not third.become_candidate()
        first.renew()
        first.resign(clean=True)
        second.wait(30)
        assert second.become_candidate()
        assert not third._changed.is_set()

    def test_a_middle_one_that_leaves_promotes_no_candidate(self, candidates: Candidates) -> None:
        (_, first), (_, second), (_, third) = candidates
        elect(first)
        assert not second.become_candidate()
        assert not third.become_candidate()
        second.resign(clean=False)
        third.wait(5)
        assert not third.become_candidate()
