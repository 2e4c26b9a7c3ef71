"""The allocator's decisions: what it publishes, and when. No thread, and a clock of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from celery_dq.allocation import nodes
from celery_dq.allocation.assignment import RunningWorker
from celery_dq.allocation.nodes import Generation, Members, PublishedAssignment, Registration
from celery_dq.allocation.rebalancer import Rebalancer
from celery_dq.errors import CorruptRecord, NotElected, ZooKeeperUnreachable
from celery_dq.testing.waiting import wait_until
from celery_dq.znodes import AllocationNodes
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import ask_all, create, transact
from tests.curator.expiry import break_connection
from tests.doubles.jumping_clock import JumpingClock

NODES = AllocationNodes("online")
DELAY_S = 5.0


class Team:
    """An allocator, and registrations of workers."""

    def __init__(self, hosts: str) -> None:
        self._hosts = hosts
        self.session = Session(hosts, timeout_s=4.0)
        self._sessions = [self.session]
        self.clock = JumpingClock()
        self.published = PublishedAssignment(self.session, NODES)
        self.rebalancer = self.allocator(1)

    def allocator(self, token: int) -> Rebalancer:
        made = Rebalancer(self.session, NODES, DELAY_S, self.clock)
        made.inaugurate(token)
        return made

    def worker(self, name: str, draining: bool = False, **queues: int) -> Registration:
        session = Session(self._hosts, timeout_s=4.0)
        self._sessions.append(session)
        registration = Registration(session, NODES, name)
        registration.write(RunningWorker(name, queues or {"push": 16}, draining))
        return registration

    def published_after(self, rebalancer: Rebalancer | None = None) -> dict[str, Any]:
        """Let the allocator look once; return what each worker is to serve."""
        (rebalancer or self.rebalancer).execute(True)
        return {name: served for name, served in self.lists().items() if served}

    def lists(self) -> dict[str, Any]:
        generation = self.published.generation()
        return self.published.read(generation.number).lists() if generation else {}

    @property
    def generation(self) -> Generation:
        return self.published.generation() or Generation()

    def folders(self) -> list[str]:
        found: list[str] = self.session.ask(
            lambda client: client.get_children_async(NODES.serverlist), self.session.timeout_s
        )
        return sorted(found)

    def close(self) -> None:
        for session in self._sessions:
            session.close()


@pytest.fixture
def team(hosts: str) -> Iterator[Team]:
    team = Team(hosts)
    yield team
    team.close()


def test_departures_act_at_once_and_joins_wait_for_more(team: Team) -> None:
    assert team.published_after() == {}
    first = team.worker("a")
    assert team.published_after() == {"a": {"push": tuple(range(16))}}
    second = team.worker("b")
    assert set(team.published_after()) == {"a"}
    team.clock.jump(DELAY_S - 0.1)
    team.worker("c")
    assert set(team.published_after()) == {"a"}
    team.clock.jump(0.2)
    assert set(team.published_after()) == {"a", "b", "c"}
    assert team.generation == Generation(2, 1, team.generation.since, 3, 16, team.generation.moved)
    second.remove()
    assert set(team.published_after()) == {"a", "c"}
    # A change that ends before the delay has no effect.
    later = team.worker("d")
    team.published_after()
    later.remove()
    team.published_after()
    team.clock.jump(DELAY_S + 1)
    assert set(team.published_after()) == {"a", "c"}
    # Without a worker, the last assignment stays.
    first.remove()
    for worker in ("c",):
        assert set(team.published_after()) == {worker}
    assert team.generation.number == 4
    # Only the generation in force and the one before are kept.
    assert team.folders() == ["0000000003", "0000000004"]


@pytest.mark.parametrize("back", [0, 1, 2])
def test_workers_that_return_after_an_outage_find_their_partitions(team: Team, back: int) -> None:
    """All sessions have ended; the workers return one after the other, and one of them never does."""
    names = ["a", "b", "c"]
    before = [team.worker(name) for name in names]
    served = team.published_after()
    for registration in before:
        registration.remove()
    allocator = team.allocator(2)
    allocator.execute(True)
    for name in names[: back + 1]:
        team.worker(name)
        assert team.published_after(allocator) == served
    assert team.generation.number == 1
    team.clock.jump(DELAY_S + 0.1)
    assert set(team.published_after(allocator)) == set(names[: back + 1])


def test_the_partitions_of_an_allocator_that_died_do_not_wait(team: Team) -> None:
    """The other workers have kept their sessions, so no worker is on its way back."""
    first = team.worker("a")
    team.worker("b")
    team.published_after()
    team.clock.jump(DELAY_S + 0.1)
    assert set(team.published_after()) == {"a", "b"}
    first.remove()
    assert set(team.published_after(team.allocator(2))) == {"b"}


def test_a_member_whose_node_was_deleted_by_hand_registers_again(team: Team) -> None:
    lost = threading.Event()
    session = Session(team._hosts, timeout_s=4.0)
    team._sessions.append(session)
    member = RunningWorker("a", {"push": 16})
    registration = Registration(session, NODES, "a", lost.set)
    assert registration.write(member)
    assert not registration.write(member)
    path = NODES.member("a", session.id or 0)
    team.session.ask(lambda client: client.delete_async(path), 4)
    assert lost.wait(30)
    assert registration.write(member)
    assert Members(team.session, NODES).read() == [member]


def test_a_draining_worker_gives_its_partitions_away_unless_it_is_the_last(team: Team) -> None:
    first = team.worker("a")
    team.published_after()
    first.write(RunningWorker("a", {"push": 16}, draining=True))
    assert set(team.published_after()) == {"a"}
    team.worker("b", mail=4, push=16)
    wanted = {"b": {"push": tuple(range(16)), "mail": tuple(range(4))}}
    # The watch of a node that changes is answered in another thread.
    wait_until(lambda: team.published_after() == wanted, what=lambda: str(team.lists()))


def test_more_partitions_and_new_queues_are_served_at_once(team: Team) -> None:
    first = team.worker("a", push=4)
    team.worker("b", push=4)
    team.published_after()
    first.write(RunningWorker("a", {"push": 6, "mail": 1}))
    wait_until(lambda: "mail" in team.published_after()["a"], what=lambda: str(team.lists()))
    served = team.lists()
    assert sorted(number for each in served.values() for number in each["push"]) == list(range(6))
    assert served["a"]["mail"] == (0,)


def test_a_worker_that_restarts_keeps_its_partitions(team: Team) -> None:
    former = team.worker("a")
    team.worker("b")
    before = team.published_after()
    # The node of the killed process is there until its session ends.
    team.worker("a")
    assert team.published_after() == before
    former.remove()
    assert team.published_after() == before
    assert team.generation.number == 1


def test_a_worker_registers_again_after_a_removal_whose_answer_was_lost(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = team.worker("a")
    ask = Session.ask

    def answer_lost(session: Session, request: Any, timeout_s: float) -> None:
        ask(session, request, timeout_s)
        raise ZooKeeperUnreachable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(Session, "ask", answer_lost)
        with pytest.raises(ZooKeeperUnreachable):
            worker.remove()
    assert worker.may_exist
    assert Members(team.session, NODES).read() == []
    assert worker.write(RunningWorker("a", {"push": 16}))
    assert set(team.published_after()) == {"a"}
    assert not worker.write(RunningWorker("a", {"push": 16})), "nothing to write"


def test_the_next_allocator_continues_and_the_former_one_is_refused(team: Team) -> None:
    team.worker("a")
    team.published_after()
    second = team.allocator(2)
    assert set(team.published_after(second)) == {"a"}
    assert team.generation.number == 1
    team.worker("b")
    team.published_after(second)
    team.clock.jump(DELAY_S)
    assert set(team.published_after(second)) == {"a", "b"}
    team.clock.jump(DELAY_S)
    team.published_after()
    team.clock.jump(DELAY_S)
    with pytest.raises(NotElected, match="later allocator with token 2"):
        team.published_after()
    # An allocator that was lost between the lists and the flip leaves a folder.
    team.session.ask(lambda client: client.create_async(NODES.lists(3) + "/a", makepath=True), 4.0)
    team.worker("c", other=2)
    assert set(team.published_after(second)) == {"a", "b", "c"}
    assert team.generation.number == 4
    assert team.folders() == ["0000000002", "0000000004"]


@pytest.mark.logged_error("was not published")
def test_an_assignment_that_is_too_large_is_not_published(
    team: Team, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    team.worker("a")
    team.published_after()
    team.worker("b", mail=3)
    with monkeypatch.context() as patched:
        patched.setattr(nodes, "pack", lambda value: b"x" * 2_000_000)
        assert set(team.published_after()) == {"a"}
    assert "start more workers, or give the queues fewer partitions" in caplog.text
    assert team.folders() == ["0000000001"], "nothing stays of the refused assignment"
    assert set(team.published_after()) == {"a", "b"}


def test_a_node_that_changes_before_its_answer_is_read_is_read_again(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, changed = team.worker("a"), threading.Event()
    reader = Members(team.session, NODES, changed.set)

    def changes_meanwhile(*args: Any) -> Any:
        answers = ask_all(*args)
        worker.write(RunningWorker("a", {"push": 32}))
        assert changed.wait(30)
        return answers

    with monkeypatch.context() as patched:
        patched.setattr(nodes, "ask_all", changes_meanwhile)
        assert reader.read() == [RunningWorker("a", {"push": 16})]
    assert reader.read() == [RunningWorker("a", {"push": 32})]


def test_a_node_that_changes_after_a_broken_connection_is_read_again(team: Team) -> None:
    worker = team.worker("a")
    assert team.published_after() == {"a": {"push": tuple(range(16))}}
    session = team.session.id
    break_connection(team.session)
    worker.write(RunningWorker("a", {"push": 32}))
    wait_until(lambda: team.published_after() == {"a": {"push": tuple(range(32))}})
    assert team.session.id == session


def test_foreign_nodes_disturb_no_one(team: Team) -> None:
    team.worker("a")
    for name, data in (("b|1", b"hello"), ("c", b"")):
        transact(team.session, [create(f"{NODES.running}/{name}", data)], 4.0)
    assert Members(team.session, NODES).read() == [
        RunningWorker("a", {"push": 16}),
        RunningWorker("b"),
        RunningWorker("c"),
    ]
    assert set(team.published_after()) == {"a"}
    team.session.ask(lambda client: client.set_async(NODES.generation, b"hello"), 4.0)
    with pytest.raises(CorruptRecord, match="delete the node"):
        team.published.generation()
