"""Random sequences of puts, takes, finishes and removals, compared with a list."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from celery_dq.curator.queue import DistributedIdQueue, DistributedPriorityQueue, LeasedItem
from celery_dq.zookeeper.session import Session

Made = Callable[[type[Any], bool], Any]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(-3, 3)),
        st.tuples(st.just("get"), st.just(0)),
        st.tuples(st.sampled_from(["finish", "requeue", "release"]), st.integers(0, 5)),
        st.tuples(st.just("remove"), st.integers(-3, 3)),
    ),
    max_size=20,
)
few = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def sessions(hosts: str) -> Iterator[tuple[Session, Session]]:
    both = Session(hosts, timeout_s=30), Session(hosts, timeout_s=30)
    yield both
    for session in both:
        session.close()


class Model:
    """The expected state of the queue: (rank, birth, number, mark) of waiting and of held items."""

    def __init__(self, *, ranked: bool) -> None:
        self._ranked = ranked
        self._births = 0
        self.waiting: list[tuple[int, int, int, int]] = []
        self.held: list[tuple[tuple[int, int, int, int], LeasedItem]] = []

    def add(self, mark: int, number: int) -> None:
        self._births += 1
        self.waiting.append((mark if self._ranked else 0, self._births, number, mark))
        self.waiting.sort()


def play(kind: type[Any], steps: list[tuple[str, int]], sessions: tuple[Session, Session]) -> None:
    path = f"/q-{uuid.uuid4().hex}"
    queue = kind(sessions[0], path, lock_path=f"{path}-locks")
    producer = kind(sessions[1], path, lock_path=f"{path}-locks")
    model = Model(ranked=kind is DistributedPriorityQueue)
    number = 0
    for step, mark in steps:
        if step == "put":
            number += 1
            producer.put(number, mark if kind is DistributedPriorityQueue else f"id/{mark}")
            model.add(mark, number)
        elif step == "get":
            # Reads on one session may lag behind writes on another.
            queue.session.open().sync(path)
            received = queue.poll()
            if not model.waiting:
                assert received is None
                continue
            entry = model.waiting.pop(0)
            assert received is not None
            assert received.item == entry[2]
            model.held.append((entry, received))
        elif step == "remove":
            if kind is DistributedIdQueue:
                doomed = [entry for entry in model.waiting if entry[3] == mark]
                assert producer.remove(f"id/{mark}") == len(doomed)
                model.waiting = [entry for entry in model.waiting if entry[3] != mark]
        elif model.held:
            entry, received = model.held.pop(mark % len(model.held))
            if step == "finish":
                assert received.finish()
            elif step == "requeue":
                assert received.requeue()
                model.add(entry[3], entry[2])
            else:
                received.release()
                model.waiting.append(entry)
                model.waiting.sort()
    assert producer.size() == len(model.waiting) + len(model.held)
    for _entry, received in model.held:
        assert received.finish()
    left = []
    while (received := queue.poll()) is not None:
        left.append(received.item)
        assert received.finish()
    assert left == [entry[2] for entry in model.waiting]
    assert producer.size() == 0
    assert sessions[0].open().get_children(f"{path}-locks") == [] if number else True
    queue.close()
    producer.close()


@few
@given(steps=STEPS)
def test_a_priority_queue_is_like_a_sorted_list(
    steps: list[tuple[str, int]], sessions: tuple[Session, Session]
) -> None:
    play(DistributedPriorityQueue, steps, sessions)


@few
@given(steps=STEPS)
def test_an_id_queue_is_like_a_list(steps: list[tuple[str, int]], sessions: tuple[Session, Session]) -> None:
    play(DistributedIdQueue, steps, sessions)
