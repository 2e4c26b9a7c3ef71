"""A worker's side of the allocation: what it serves, also without ZooKeeper or without its broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from celery_dq.allocation.assignment import place
from celery_dq.allocation.follower import Follower
from celery_dq.allocation.rebalancer import allocator
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.znodes import AllocationNodes
from celery_dq.zookeeper.session import Session
from tests.doubles.jumping_clock import JumpingClock

ALL = frozenset(range(8))
#: A session that no pause of the machine ends, and one that must end.
SESSION_S, SHORT_S = 4.0, 1.0
SILENCE_S = 60.0


class Mate:
    """One worker: a follower and a candidate for the allocator, with a session of their own."""

    def __init__(self, name: str, hosts: str, session_s: float) -> None:
        self.session = Session(hosts, timeout_s=session_s)
        self.clock = JumpingClock()
        #: How often the follower has asked whether a queue is allocated.
        self.asked = 0
        #: What the follower has served, at each change.
        self.history: list[frozenset[int] | None] = []
        self.follower = Follower(
            self.session,
            AllocationNodes("online"),
            name,
            is_allocated=self._is_allocated,
            silence_s=SILENCE_S,
            clock=self.clock,
        )
        self.follower.add_listener(lambda: self.history.append(self.served))
        self._allocator = allocator(self.session, "online", name, join_delay_s=0.0)

    def _is_allocated(self, queue: str, count: int) -> bool:
        self.asked += 1
        return count > 1

    def open(self, **counts: int) -> Mate:
        self.consume(**(counts or {"push": 8}))
        self.follower.open()
        self._allocator.open()
        return self

    def consume(self, **counts: int) -> None:
        for queue, count in counts.items():
            self.follower.consumes(queue, count)

    @property
    def served(self) -> frozenset[int] | None:
        return self.follower.served("push")

    def close(self) -> None:
        self.follower.close(5)
        self._allocator.close(5)
        self.session.close()


@pytest.fixture
def mates() -> Iterator[Callable[..., Mate]]:
    """Makes workers, and closes them."""
    made: list[Mate] = []

    def make(name: str, hosts: str, session_s: float = SESSION_S, **counts: int) -> Mate:
        made.append(Mate(name, hosts, session_s))
        return made[-1].open(**counts)

    yield make
    for mate in made:
        mate.close()


def test_partitions_go_before_others_come(mates: Callable[..., Mate], hosts: str) -> None:
    first = mates("a", hosts)
    wait_until(lambda: first.served == ALL)
    assert first.follower.served("mail") is None, "it is not allocated"
    second = mates("b", hosts)
    wait_until(lambda: first.served and second.served)
    wait_until(lambda: first.served | second.served == ALL)  # type: ignore[operator]  # waited for
    assert not first.served & second.served  # type: ignore[operator]  # the same
    first.follower.drain()
    wait_until(lambda: second.served == ALL)
    assert first.served == frozenset()
    assert first.follower.report()["draining"]
    assert first.history[:2] == [frozenset(), ALL]
    assert second.history[-1] == ALL
    second.follower.close(5)
    wait_until(lambda: first.served == ALL, what="the last worker serves, although it drains")


def test_workers_serve_on_without_zookeeper(
    own_zookeeper: ZooKeeperServer, mates: Callable[..., Mate], caplog: pytest.LogCaptureFixture
) -> None:
    own_zookeeper.stop()
    first = mates("a", own_zookeeper.hosts, session_s=SHORT_S)
    assert first.served == frozenset()
    first.clock.jump(SILENCE_S + 1)  # a session that lasts longer than a silence of the broker may
    wait_until(lambda: first.served is None, what="without any assignment it serves all")
    assert "is ZooKeeper at dq_election reachable?" in caplog.text
    own_zookeeper.start()
    wait_until(lambda: first.served == ALL)
    assert "gives its partitions away" not in caplog.text, "it had none, and so no heartbeat to be answered"
    second = mates("b", own_zookeeper.hosts, session_s=SHORT_S)
    wait_until(lambda: second.served)
    before = first.served, second.served
    caplog.clear()
    own_zookeeper.kill()
    wait_until(lambda: caplog.text.count("serves what it served before") == 2)
    assert (first.served, second.served) == before
    own_zookeeper.restart()
    wait_until(lambda: caplog.text.count("follows the allocation again") == 2)
    wait_until(lambda: (first.served, second.served) == before)


def test_a_worker_without_allocated_queues_misses_no_assignment(
    mates: Callable[..., Mate], hosts: str, caplog: pytest.LogCaptureFixture
) -> None:
    mate = mates("a", hosts, push=1)
    mate.clock.jump(SILENCE_S + 1)
    asked = mate.asked

    def rounds_passed() -> bool:
        mate.consume(push=1)
        return mate.asked > asked + 10

    wait_until(rounds_passed)
    assert mate.served is None
    assert "is ZooKeeper at dq_election reachable?" not in caplog.text


def test_a_queue_that_gets_partitions_without_zookeeper_is_served_on(
    own_zookeeper: ZooKeeperServer, mates: Callable[..., Mate]
) -> None:
    # Given a worker that follows an assignment of another queue
    first = mates("a", own_zookeeper.hosts, mail=8, push=1)
    wait_until(lambda: first.follower.served("mail") == ALL)
    own_zookeeper.kill()
    # When its queue of one partition gets more, it keeps the first one
    first.consume(push=4)
    assert first.served == frozenset({0})
    # Until the allocator has assigned them.
    first.history.clear()
    own_zookeeper.restart()
    wait_until(lambda: first.served == frozenset(range(4)))
    assert all(served and 0 in served for served in first.history)
    # Another worker gets all of them, and none stays as before.
    second = mates("b", own_zookeeper.hosts, push=4)
    wait_until(lambda: second.served)
    first.follower.drain()
    wait_until(lambda: second.served == frozenset(range(4)))
    wait_until(lambda: first.served == frozenset())


def test_a_queue_whose_partitions_are_all_of_other_workers_is_released(
    mates: Callable[..., Mate], hosts: str
) -> None:
    names = ["a", "b", "c"]
    # Of three workers, one gets none of two partitions, and notices last that there are two.
    busy = set(place([("push", 0), ("push", 1)], names).values())
    for name in busy:
        mates(name, hosts, push=2)
    late = mates(*set(names) - busy, hosts, push=1, mail=2)
    wait_until(lambda: late.follower.served("mail"))
    late.consume(push=2)
    wait_until(lambda: late.served == frozenset())


def test_a_worker_whose_broker_is_silent_gives_its_partitions_away(
    mates: Callable[..., Mate], hosts: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = mates("a", hosts)
    wait_until(lambda: first.served == ALL)
    second = mates("b", hosts)
    wait_until(lambda: second.served)
    first.clock.jump(SILENCE_S + 1)
    wait_until(lambda: second.served == ALL)
    assert first.served, "it serves on, in case that ZooKeeper alone sees it as alive"
    assert "because the broker has not answered it for 60 s" in caplog.text
    first.follower.broker_answered()
    wait_until(lambda: first.served and second.served != ALL)
    wait_until(lambda: first.served | second.served == ALL)  # type: ignore[operator]  # waited for
