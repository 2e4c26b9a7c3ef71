"""State of one process, which a forked child does not inherit."""

from __future__ import annotations

import threading

from celery_dq.per_process import OwnerProcess, PerProcess
from tests.unit.test_app_context import in_child


def test_the_value_is_made_at_the_first_call_and_once() -> None:
    made: list[object] = []

    def make() -> object:
        made.append(object())
        return made[-1]

    state = PerProcess(make)
    assert state.peek() is None
    assert made == []
    assert state.get() is state.get() is state.peek() is made[0]
    assert len(made) == 1


def test_a_forked_child_makes_its_own_value() -> None:
    state: PerProcess[list[int]] = PerProcess(list)
    state.get().append(1)

    def of_child() -> list[object]:
        before, own = state.peek(), state.get()
        own.append(2)
        return [before, state.get(), state.peek(), len(state._values)]

    assert in_child(of_child) == "[None, [2], [2], 1]"
    assert state.get() == [1]


def test_threads_that_come_first_together_get_one_value() -> None:
    together = threading.Barrier(4)

    def make() -> object:
        together.wait(30)
        return object()

    state = PerProcess(make)
    got: list[object] = []
    threads = [threading.Thread(target=lambda: got.append(state.get())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(got) == 4
    assert len(set(map(id, got))) == 1


def test_an_owner_is_current_in_its_own_process_only() -> None:
    owner = OwnerProcess()
    assert owner.is_current
    assert in_child(lambda: [owner.is_current, OwnerProcess().is_current]) == "[False, True]"
