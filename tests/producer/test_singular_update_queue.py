from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path

import pytest

from celery_dq.errors import QueueClosed, QueueFull
from celery_dq.producer.singular_update_queue import SingularUpdateQueue
from celery_dq.testing.waiting import wait_until
from tests.children import in_child

ROOT = Path(__file__).parents[2]


class Gate:
    """A handler that records its requests, and waits while it is closed."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.seen: list[int] = []
        self.threads: set[int] = set()

    def __call__(self, request: int) -> int:
        self.threads.add(threading.get_ident())
        self.opened.wait(30)
        self.seen.append(request)
        return request * 2


def test_every_update_is_applied_once_in_one_thread_and_answered() -> None:
    gate = Gate()
    gate.opened.set()
    with SingularUpdateQueue[int, int](gate, capacity=7) as queue:
        answers: dict[int, Future[int]] = {}

        def caller(start: int) -> None:
            for request in range(start, start + 200):
                answers[request] = queue.submit(request)

        callers = [threading.Thread(target=caller, args=(start,)) for start in range(0, 1000, 200)]
        for thread in callers:
            thread.start()
        for thread in callers:
            thread.join()
        assert {request: future.result(30) for request, future in answers.items()} == {
            request: request * 2 for request in range(1000)
        }
    assert len(gate.threads) == 1
    assert threading.get_ident() not in gate.threads
    for start in range(0, 1000, 200):
        assert [each for each in gate.seen if start <= each < start + 200] == list(range(start, start + 200))


def test_an_error_goes_to_its_submitter_only() -> None:
    def divide(request: int) -> float:
        if request == 7:
            raise SystemExit(3)
        return 1 / request

    with SingularUpdateQueue[int, float](divide) as queue:
        futures = [queue.submit(request) for request in (1, 0, 7, 2)]
        assert futures[0].result(30) == 1
        with pytest.raises(ZeroDivisionError):
            futures[1].result(30)
        with pytest.raises(SystemExit):
            futures[2].result(30)
        assert futures[3].result(30) == 0.5


def test_a_full_queue_raises_or_waits_as_reported() -> None:
    gate = Gate()
    queue = SingularUpdateQueue[int, int](gate, capacity=2, block=False)
    queue.submit(0)
    wait_until(lambda: len(queue) == 0)
    queue.submit(1)
    queue.submit(2)
    with pytest.raises(QueueFull, match="2 requests wait already"):
        queue.submit(3)
    with pytest.raises(QueueFull):
        queue.submit(3, block=True, timeout=0.01)
    waiting = threading.Thread(target=lambda: queue.submit(4, block=True))
    waiting.start()
    gate.opened.set()
    waiting.join(30)
    assert queue.close()
    assert gate.seen == [0, 1, 2, 4]


def test_close_handles_waiting_messages_and_refuses_more() -> None:
    gate = Gate()
    queue = SingularUpdateQueue[int, int](gate)
    futures = [queue.submit(request) for request in range(5)]
    assert not queue.close(timeout=0.01)
    with pytest.raises(QueueClosed):
        queue.submit(9)
    gate.opened.set()
    assert queue.close(timeout=10)
    assert [future.result(0) for future in futures] == [0, 2, 4, 6, 8]
    assert queue.close()


def test_close_wakes_calls_that_wait_for_room() -> None:
    gate = Gate()
    queue = SingularUpdateQueue[int, int](gate, capacity=1)
    queue.submit(0)
    wait_until(lambda: len(queue) == 0)
    queue.submit(1)
    refused: list[Exception] = []

    def caller() -> None:
        try:
            queue.submit(2)
        except QueueClosed as error:
            refused.append(error)

    thread = threading.Thread(target=caller)
    thread.start()
    queue.close(timeout=0.01)
    thread.join(30)
    assert len(refused) == 1
    gate.opened.set()
    queue.close()


def test_a_cancelled_request_is_not_applied() -> None:
    gate = Gate()
    with SingularUpdateQueue[int, int](gate) as queue:
        queue.submit(0)
        wait_until(lambda: len(queue) == 0)
        future = queue.submit(1)
        assert future.cancel()
        queue.submit(2)
        gate.opened.set()
        with pytest.raises(CancelledError):
            future.result(30)
    assert gate.seen == [0, 2]


def test_a_chain_gives_the_last_result_and_any_error() -> None:
    with (
        SingularUpdateQueue[int, float](lambda request: 10 / request) as last,
        SingularUpdateQueue[int, float](lambda request: request - 1, then=last) as first,
    ):
        assert first.submit(3).result(30) == 5
        with pytest.raises(ZeroDivisionError):
            first.submit(1).result(30)
    with pytest.raises(QueueClosed):
        first.submit(3)


def test_the_handler_may_submit_to_its_own_full_queue() -> None:
    seen: list[int] = []

    def handler(request: int) -> None:
        seen.append(request)
        if request < 5:
            queue.submit(request + 1)
            queue.submit(10)

    queue: SingularUpdateQueue[int, None] = SingularUpdateQueue(handler, capacity=1)
    queue.submit(0).result(30)
    wait_until(lambda: 5 in seen and seen.count(10) == 5)
    assert queue.close()


def test_a_grouped_handler_gets_all_that_waits() -> None:
    gate = threading.Event()
    batches: list[list[int]] = []

    def handler(requests: Sequence[int]) -> list[int]:
        gate.wait(30)
        batches.append(list(requests))
        if 13 in requests:
            raise ValueError("unlucky")
        return [-request for request in requests]

    queue: SingularUpdateQueue[int, int] = SingularUpdateQueue.grouped(handler, max_batch=4)
    futures = [queue.submit(0)]
    wait_until(lambda: len(queue) == 0)
    futures += [queue.submit(request) for request in (1, 2, 3, 4, 13)]
    gate.set()
    assert [future.result(30) for future in futures[:5]] == [0, -1, -2, -3, -4]
    with pytest.raises(ValueError, match="unlucky"):
        futures[5].result(30)
    assert batches == [[0], [1, 2, 3, 4], [13]]
    queue.close()


def test_a_grouped_handler_that_loses_results_is_reported() -> None:
    with (
        SingularUpdateQueue[int, int].grouped(lambda requests: []) as queue,
        pytest.raises(TypeError, match="0 results"),
    ):
        queue.submit(1).result(30)


def test_a_child_has_an_empty_queue_of_its_own() -> None:
    gate = Gate()
    queue = SingularUpdateQueue[int, int](gate)
    queue.submit(0)
    wait_until(lambda: len(queue) == 0)
    queue.submit(1)

    def child() -> list[object]:
        gate.opened.set()
        return [len(queue), queue.submit(5).result(30), gate.seen, queue.close()]

    assert in_child(child) == [0, 10, [5], True]
    gate.opened.set()
    assert queue.close()
    assert gate.seen == [0, 1]


def test_a_destructor_may_submit_while_its_thread_submits() -> None:
    with SingularUpdateQueue[int, int](lambda request: request) as queue:

        class Late:
            def __init__(self) -> None:
                self.myself = self

            def __del__(self) -> None:
                queue.submit(-1, block=False)

        old = gc.get_threshold()
        gc.set_threshold(1)  # a collection at each allocation, also inside submit()
        try:
            for request in range(200):
                Late()
                queue.submit(request).result(30)
        finally:
            gc.set_threshold(*old)
        gc.collect()


def test_an_asyncio_caller_awaits_it() -> None:
    async def call() -> int:
        return await asyncio.wrap_future(queue.submit(21, block=False))

    with SingularUpdateQueue[int, int](lambda request: request * 2) as queue:
        assert asyncio.run(call()) == 42


def test_waiting_messages_are_handled_at_exit_and_the_program_ends() -> None:
    program = (
        "import time\n"
        "from celery_dq.producer.singular_update_queue import SingularUpdateQueue\n"
        "queue = SingularUpdateQueue(lambda each: (time.sleep(0.02), print(each, flush=True)))\n"
        "[queue.submit(each) for each in range(5)]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.split() == ["0", "1", "2", "3", "4"]


def test_a_chain_handles_waiting_messages_at_exit(tmp_path: Path) -> None:
    program = (
        "import time\n"
        "from celery_dq.producer.singular_update_queue import SingularUpdateQueue\n"
        "last = SingularUpdateQueue(lambda each: (time.sleep(0.02), print(each, flush=True)))\n"
        "first = SingularUpdateQueue(lambda each: (time.sleep(0.02), each)[1], then=last)\n"
        "ORDER\n"
        "[first.submit(each) for each in range(5)]\n"
    )
    for order in ("", "last.submit('last')"):
        done = subprocess.run(
            [sys.executable, "-c", program.replace("ORDER", order)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        assert done.stdout.split() == ["last"] * bool(order) + ["0", "1", "2", "3", "4"]


def test_a_queue_whose_thread_cannot_start_refuses_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")  # of Python 3.12, in atexit

    queue: SingularUpdateQueue[int, int] = SingularUpdateQueue(lambda each: each)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        for _ in range(2):
            with pytest.raises(QueueClosed, match="cannot start"):
                queue.submit(1).result(5)
    assert queue.submit(2).result(5) == 2
    assert queue.close()


@pytest.mark.parametrize("patch", ["gevent.monkey.patch_all", "eventlet.monkey_patch"])
def test_greenlets_take_turns_while_they_wait(patch: str) -> None:
    program = (
        f"import {patch.rpartition('.')[0]}; {patch}()\n"
        "import threading, time\n"
        "from celery_dq.producer.singular_update_queue import SingularUpdateQueue\n"
        "queue = SingularUpdateQueue(lambda each: (time.sleep(0.01), each)[1], capacity=2)\n"
        "got = []\n"
        "def call(n): got.append(queue.submit(n).result(10))\n"
        "callers = [threading.Thread(target=call, args=(n,)) for n in range(20)]\n"
        "[each.start() for each in callers]; [each.join() for each in callers]\n"
        "print(sorted(got) == list(range(20)), queue.close())\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity"):
        SingularUpdateQueue(lambda request: request, capacity=0)
    with pytest.raises(ValueError, match="max_batch"):
        SingularUpdateQueue.grouped(lambda requests: requests, max_batch=0)
