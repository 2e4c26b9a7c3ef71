"""The end of a buffer, and the threads that wait for it meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from celery_dq.producer import flusher
from celery_dq.producer.buffer import Limits
from celery_dq.producer.buffered_producer import BufferedProducer
from celery_dq.testing.waiting import wait_until
from tests.producer.producer_harness import ProducerHarness, close_at_once, put


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
