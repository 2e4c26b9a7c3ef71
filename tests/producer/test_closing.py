"""The end of a buffer, and the threads that wait for it meanwhile."""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing.util
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import billiard.util
import pytest

from celery_dq.producer import flusher
from celery_dq.producer.buffer import Limits
from celery_dq.producer.buffered_producer import BufferedProducer
from celery_dq.producer.flusher import Undelivered
from celery_dq.producer.sender import Refusal
from celery_dq.testing.waiting import wait_until
from tests.producer.producer_harness import ProducerHarness, arrived, close_at_once, message_store, put


def flush_in_asyncio(producer: BufferedProducer) -> int:
    return asyncio.run(producer.aflush())


WAITS = pytest.mark.parametrize("wait", [BufferedProducer.flush, flush_in_asyncio], ids=["flush", "aflush"])


class Waiting:
    """A thread that waits for a buffer without a limit."""

    def __init__(self, wait: Callable[[BufferedProducer], int], producer: BufferedProducer) -> None:
        self._left: list[int] = []
        self._thread = threading.Thread(target=lambda: self._left.append(wait(producer)), daemon=True)
        self._thread.start()

    def left(self) -> int:
        self._thread.join(10)
        assert not self._thread.is_alive(), "it waits for ever"
        return self._left[0]


@WAITS
def test_a_flush_ends_with_a_close_by_another_thread(
    harness: ProducerHarness, wait: Callable[[BufferedProducer], int]
) -> None:
    producer = harness.producer(limits=Limits(linger_s=60))
    harness.shelf.down = True
    put(producer, 1, 2)
    waiting = Waiting(wait, producer)
    wait_until(lambda: producer.snapshot().last_error != "")  # its flush has ended the linger
    assert close_at_once(producer) == 2
    assert waiting.left() == 2


@WAITS
def test_a_flush_ends_when_the_search_that_it_waits_for_was_cut_off(
    harness: ProducerHarness, wait: Callable[[BufferedProducer], int]
) -> None:
    producer = harness.producer()
    producer.start()
    assert producer._own is not None
    assert producer._own.flusher.stop(30)  # as a close in another thread does
    assert Waiting(wait, producer).left() == 1


@WAITS
def test_a_flush_ends_where_no_thread_can_start(
    harness: ProducerHarness, wait: Callable[[BufferedProducer], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")  # of Python 3.12, in atexit

    monkeypatch.setattr(flusher, "start_thread", refused)
    producer = harness.producer()
    put(producer, 1, 2)
    assert Waiting(wait, producer).left() == 2


class Stalled:
    """Lets the broker answer no batch until :meth:`end`."""

    def __init__(self, harness: ProducerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = threading.Event()
        self._answers = threading.Event()
        send = harness.shelf.send

        def wait_and_send(*batch: Any) -> Sequence[Refusal]:
            self.calls.set()
            self._answers.wait(60)
            return send(*batch)

        monkeypatch.setattr(harness.shelf, "send", wait_and_send)

    def end(self) -> None:
        self._answers.set()


@pytest.fixture
def stalled(harness: ProducerHarness, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stalled]:
    stalled = Stalled(harness, monkeypatch)
    yield stalled
    stalled.end()


def reports_of(producer: BufferedProducer) -> list[tuple[int, str]]:
    """Return a list that gets the number and the state of each message that is reported to `on_error`."""
    reports: list[tuple[int, str]] = []

    def report(error: BaseException, message: Undelivered, state: str) -> None:
        reports.append((int(message.task_id), state))

    producer.hooks.on_error.append(report)
    return reports


def test_a_close_during_a_call_to_the_broker_reports_the_messages_in_memory(
    harness: ProducerHarness, stalled: Stalled
) -> None:
    producer = harness.producer(memory=True, limits=Limits(batch_size=1))
    reports = reports_of(producer)
    put(producer, 1)
    assert stalled.calls.wait(30)
    put(producer, 2, 3)
    in_use = producer._own
    waiting = Waiting(BufferedProducer.flush, producer)
    assert producer.close(0.05) == 3
    assert reports == [(1, "possibly_sent"), (2, "not_sent"), (3, "not_sent")]
    stalled.end()
    assert in_use is not None
    assert in_use.flusher.stop(30)
    assert waiting.left() == 2
    # A message that was reported as not sent is not sent later.
    assert arrived(harness) == [1]


def test_a_call_that_meets_such_a_close_is_sent(harness: ProducerHarness, stalled: Stalled) -> None:
    producer = harness.producer(memory=True, limits=Limits(batch_size=1))
    put(producer, 1)
    assert stalled.calls.wait(30)
    found = message_store(producer)
    really = found.put

    def preempted(*message: Any) -> bool:
        # Another thread closes the buffer between the check and the put.
        producer.close(0.05)
        stalled.end()
        return bool(really(*message))

    found.put = preempted
    put(producer, 2)
    assert producer.flush(30) == 0
    assert 2 in arrived(harness)


def test_the_files_of_such_a_close_are_unlocked_when_the_call_is_over(
    harness: ProducerHarness, stalled: Stalled
) -> None:
    producer = harness.producer(limits=Limits(batch_size=1))
    reports = reports_of(producer)
    put(producer, 1)
    assert stalled.calls.wait(30)
    put(producer, 2, 3)
    assert producer.close(0.05) == 3
    assert reports == []
    later = harness.producer()
    later.start()
    stalled.end()
    wait_until(lambda: sorted(arrived(harness)) == [1, 2, 3])
    assert later.flush(30) == 0
    assert producer.snapshot().owners == ()


def test_messages_that_a_new_folder_could_not_take_are_reported(harness: ProducerHarness) -> None:
    producer = harness.producer()
    reports = reports_of(producer)
    harness.shelf.down = True
    put(producer, 1, 2)
    box = message_store(producer)
    with box.lock:
        shutil.rmtree(harness.folder)
        harness.folder.touch()  # a file with the name of the folder
    wait_until(lambda: producer.snapshot().degraded)
    assert close_at_once(producer) == 2
    assert [number for number, _ in reports] == [1, 2]


def test_buffers_that_are_closed_leave_no_handlers_for_the_end_of_the_process(
    harness: ProducerHarness,
) -> None:
    producer = harness.producer(sync_interval_s=600.0)
    handlers = []
    modules: list[Any] = [multiprocessing.util, billiard.util]
    for number in range(3):
        put(producer, number)
        assert producer.close(30) == 0
        finalizers = [len(module._finalizer_registry) for module in modules]
        handlers.append((atexit._ncallbacks(), *finalizers))
    assert handlers[0] == handlers[1] == handlers[2]
