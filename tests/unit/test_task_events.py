"""Gates and subscribers of a worker's tasks: their order, and the events of a task that does not run."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from billiard.pool import ApplyResult
from celery import Celery, bootsteps
from celery.contrib.testing.worker import start_worker
from celery.exceptions import TaskRevokedError
from celery.worker.request import Request
from kombu.asynchronous import set_event_loop

import celery_dq
from celery_dq.testing.waiting import wait_until
from celery_dq.worker.task_events import TaskEvents, TaskInPool, TaskSubscriber, task_events

#: Subscribers and gates are added in this order, which is not that of ``ORDER``.
ROLES = ("singleton_queues", "zookeeper")


class Recorder(TaskSubscriber):
    """Records the events of tasks, and refuses those with the name ``refused``."""

    def __init__(self, role: str, events: TaskEvents, lines: list[str]) -> None:
        self.role = role  # type: ignore[misc]  # each instance has another one
        self._lines = lines
        self._pass_on = events.add_gate(role, self.receive)
        events.subscribe(self)

    def _note(self, event: str) -> None:
        self._lines.append(f"{event} {self.role}")

    def receive(self, request: Any) -> Any:
        self._note("received")
        return self._pass_on(request)

    def follows(self, request: Any) -> bool:
        return True

    def offered(self, request: Any) -> None:
        self._note("offered")
        if request.name == "refused":
            raise TaskRevokedError(request.id)

    def refused(self, request: Any) -> None:
        self._note("refused")

    def accepted(self, request: Any) -> None:
        self._note("accepted")

    def ending(self, request: Any, info: Any, crashed: bool) -> None:
        exc = getattr(info, "exception", None)
        # Billiard wraps some exceptions.
        self._note(f"ending {type(getattr(exc, 'exc', exc)).__name__}{' crashed' * crashed}")
        if request.name == "error_while_ending":
            raise OSError

    def ended(self, request: Any, info: Any) -> None:
        self._note("ended")
        if request.name == "error_at_the_end":
            raise OSError


class UnacceptedRequest(Request):
    """A request whose start fails, as that of a revoked task does in a pool that cannot terminate it."""

    def on_accepted(self, pid: Any, time_accepted: float) -> None:
        raise NotImplementedError


@pytest.fixture(scope="module")
def all_lines() -> list[str]:
    return []


@pytest.fixture
def lines(all_lines: list[str]) -> list[str]:
    all_lines.clear()
    return all_lines


@pytest.fixture(scope="module", params=["solo", "threads"])
def app(request: pytest.FixtureRequest, all_lines: list[str]) -> Iterator[Any]:
    """An app whose worker runs in a thread of this process. One for all tests, because it stops slowly."""

    class RecordStep(bootsteps.Step):
        requires = ("celery_dq.worker.task_events:TaskEventsStep",)

        def __init__(self, consumer: Any, **options: Any) -> None:
            super().__init__(consumer, **options)
            for role in ROLES:
                Recorder(role, task_events(consumer), all_lines)

    app: Any = Celery("t", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.worker_hijack_root_logger = False
    celery_dq.setup(app)
    app.steps["consumer"].add(RecordStep)

    def run() -> None:
        pass

    def fail() -> None:
        raise KeyError

    def leave() -> None:
        sys.exit(3)

    for name, function in (("ran", run), ("failed", fail), ("refused", run), ("left", leave)):
        app.task(name=name, shared=False)(function)
    for name in ("error_while_ending", "error_at_the_end"):
        app.task(name=name, shared=False)(run)
    app.task(name="unaccepted", shared=False, Request=UnacceptedRequest)(run)
    set_event_loop(None)
    with start_worker(app, pool=request.param, concurrency=1, perform_ping_check=False, loglevel="CRITICAL"):
        yield app
    app.close()


def both(*events: str) -> list[str]:
    return [f"{event} {role}" for event in events for role in reversed(ROLES)]


def test_gates_and_subscribers_are_in_their_written_order(app: Any, lines: list[str]) -> None:
    app.tasks["ran"].delay()
    expected = both("received", "offered", "accepted", "ending NoneType", "ended")
    wait_until(partial(lines.__eq__, expected), 30, what=lambda: str(lines))


def test_a_task_that_fails_has_one_end(app: Any, lines: list[str]) -> None:
    app.tasks["failed"].delay()
    expected = both("received", "offered", "accepted", "ending KeyError", "ended")
    wait_until(partial(lines.__eq__, expected), 30, what=lambda: str(lines))


def test_a_refused_task_frees_its_slot_and_has_no_end(app: Any, lines: list[str]) -> None:
    app.tasks["refused"].delay()
    # The first one to refuse it is the first in the order.
    expected = [*both("received"), "offered zookeeper", *both("refused")]
    wait_until(partial(lines.__eq__, expected), 30, what=lambda: str(lines))
    lines.clear()
    app.tasks["ran"].delay()
    wait_until(lambda: lines[-1:] == both("ended")[-1:], 30, what=lambda: str(lines))


def test_a_task_that_leaves_its_thread_has_crashed_and_has_a_result(app: Any, lines: list[str]) -> None:
    result = app.tasks["left"].delay()
    expected = both("received", "offered", "accepted", "ending WorkerLostError crashed", "ended")
    wait_until(partial(lines.__eq__, expected), 30, what=lambda: str(lines))
    wait_until(lambda: result.state == "FAILURE", 30)


@pytest.mark.parametrize("app", ["threads"], indirect=True)
def test_a_task_whose_start_fails_in_its_thread_has_an_end(app: Any, lines: list[str]) -> None:
    app.tasks["unaccepted"].delay()
    expected = both("received", "offered", "accepted", "ended")
    wait_until(partial(lines.__eq__, expected), 30, what=lambda: str(lines))


@pytest.mark.parametrize("app", ["threads"], indirect=True)
@pytest.mark.parametrize("name", ["error_while_ending", "error_at_the_end"])
def test_an_error_of_one_subscriber_keeps_no_event_from_others(app: Any, lines: list[str], name: str) -> None:
    result = app.tasks[name].delay()
    expected = both("received", "offered", "accepted", "ending NoneType", "ended")
    wait_until(partial(lines.__eq__, expected), 30, what=lambda: str(lines))
    wait_until(lambda: result.state == "SUCCESS", 30)


def test_a_task_that_has_ended_is_freed_without_a_garbage_collection() -> None:
    events = TaskEvents.__new__(TaskEvents)
    request = UnacceptedRequest.__new__(UnacceptedRequest)
    task = TaskInPool(events, request, [])
    events._tasks = {id(request): task}
    callbacks = task.wrap({}, cancel=False)
    jobs: dict[int, Any] = {}
    task.job = ApplyResult(jobs, callbacks["callback"], accept_callback=callbacks["accept_callback"])
    ended = weakref.ref(task)
    gc.disable()
    try:
        jobs.clear()  # as billiard does when the job has its result
        assert events.remove(task)
        del task, callbacks
        assert ended() is None
    finally:
        gc.enable()
