"""Queues with their own order (priority, delay), and the simple queue."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pytest

from celery_dq.clock import ManualClock
from celery_dq.curator.queue import (
    DistributedDelayQueue,
    DistributedPriorityQueue,
    DistributedQueue,
    SimpleDistributedQueue,
)
from celery_dq.errors import ConfigurationError, InvalidMessage, InvalidPriority, QueueEmpty
from celery_dq.testing.waiting import wait_until
from celery_dq.zookeeper.session import Session
from tests.curator.collecting import Collector

Make = Callable[..., Any]
LOCKS = "/locks"
both = pytest.mark.parametrize("lock_path", [None, LOCKS], ids=["deleting", "locking"])


@both
def test_lower_priorities_come_first(make: Make, lock_path: str | None) -> None:
    queue = make(DistributedPriorityQueue, lock_path=lock_path)
    priorities = [0, -1, 1, 2**31 - 1, -(2**31), 5, 5, -300]
    for number, priority in enumerate(priorities):
        queue.put([priority, number], priority)
    queue.put_multi([[-400, 0], [-400, 1]], -400)
    seen = Collector()
    make(DistributedPriorityQueue, lock_path=lock_path, consumer=seen).start()
    assert seen.wait(10) == sorted([[p, n] for n, p in enumerate(priorities)] + [[-400, 0], [-400, 1]])
    with pytest.raises(InvalidPriority):
        queue.put("x", 2**31)


@pytest.mark.parametrize("min_items", [0, 3])
def test_a_later_more_urgent_item_overtakes(make: Make, min_items: int) -> None:
    producer = make(DistributedPriorityQueue)
    for number in range(20):
        producer.put(number, 10)
    seen = Collector()
    seen.gate.clear()
    make(DistributedPriorityQueue, lock_path=LOCKS, consumer=seen, min_items_before_refresh=min_items).start()
    # The consumer has one item.
    assert seen.waiting.wait(30)
    producer.put("urgent", -1)
    seen.gate.set()
    items = seen.wait(21)
    assert items.index("urgent") <= max(1, min_items)
    assert [item for item in items if item != "urgent"] == list(range(20))


def test_priorities_of_numbers_only(hosts: str) -> None:
    with pytest.raises(ConfigurationError, match="min_items_before_refresh = -1"):
        DistributedPriorityQueue(hosts, "/queue", min_items_before_refresh=-1)


@both
def test_items_are_served_when_they_are_due(make: Make, lock_path: str | None) -> None:
    served: list[tuple[str, float]] = []
    queue = make(DistributedDelayQueue)
    queue.put("far", time.time() + 3600)
    queue.put("past", 1.0)
    make(
        DistributedDelayQueue,
        lock_path=lock_path,
        consumer=lambda item: served.append((item, time.time())),
    ).start()
    wait_until(lambda: len(served) == 1)
    # This item is put after the one for which the consumer waits, and is due earlier.
    due = time.time() + 0.4
    queue.put("soon", datetime.fromtimestamp(due, tz=timezone.utc))
    wait_until(lambda: len(served) == 2)
    assert [item for item, _at in served] == ["past", "soon"]
    assert served[1][1] >= due
    wait_until(lambda: queue.size() == 1)
    with pytest.raises(InvalidMessage, match="has no time zone"):
        queue.put("x", datetime(2030, 1, 1))


def test_items_are_served_in_the_order_of_their_times(make: Make) -> None:
    clock = ManualClock()
    queue = make(DistributedDelayQueue, lock_path=LOCKS, clock=clock)
    numbers = list(range(50))
    random.Random(7).shuffle(numbers)
    for number in numbers:
        queue.put(number, clock.wall() + 10 + number / 1000)
    queue.put("tie", clock.wall() + 10.049)
    assert queue.poll() is None
    clock.advance(10.0245)
    early = [queue.get(30).item for _each in range(25)]
    assert queue.poll() is None
    assert early == list(range(25))
    clock.advance(1)
    assert [queue.get(30).item for _each in range(26)] == [*range(25, 50), "tie"]


def test_a_requeued_item_keeps_its_due_time(make: Make) -> None:
    clock = ManualClock()
    queue = make(DistributedDelayQueue, lock_path=LOCKS, clock=clock)
    queue.put("x", clock.wall() + 10)
    clock.advance(11)
    queue.get(30).requeue()
    clock.set_wall(clock.wall() - 5)
    assert queue.poll() is None
    clock.advance(5)
    assert queue.get(30).item == "x"


def test_sequences_are_compared_serially_over_the_roll_over(make: Make, session: Session) -> None:
    client = session.open()
    client.ensure_path("/queue")
    data = make(SimpleDistributedQueue, "/other")
    data.offer(b"")
    births = [2**31 - 2, 2**31 - 1, -(2**31), -(2**31) + 1]
    for number in reversed(births):
        client.create(f"/queue/qn-{number:010d}", str(number).encode())
    queue = make(SimpleDistributedQueue)
    assert [int(queue.remove()) for _each in births] == births


def test_a_simple_queue(make: Make) -> None:
    queue, other = make(SimpleDistributedQueue), make(SimpleDistributedQueue)
    assert queue.peek() is None
    assert queue.poll() is None
    assert queue.poll(0.05) is None
    for call in (queue.element, queue.remove):
        with pytest.raises(QueueEmpty):
            call()
    queue.offer(b"1")
    queue.offer_each([b"2", b"3", b"4", b""])
    assert queue.size() == 5
    assert queue.element() == other.element() == queue.peek() == b"1"
    assert other.remove() == b"1"
    assert queue.peek() == b"2"
    assert queue.take() == b"2"
    assert other.poll() == b"3"
    assert queue.poll(30) == b"4"
    assert queue.take() == b""
    assert other.peek() is None


def test_taking_waits_for_an_element(make: Make) -> None:
    queue, other = make(SimpleDistributedQueue), make(SimpleDistributedQueue)
    taken: list[bytes] = []
    taking = threading.Thread(target=lambda: taken.append(queue.take()))
    taking.start()
    other.offer(b"x")
    taking.join(30)
    assert taken == [b"x"]


@pytest.mark.parametrize("kind", [SimpleDistributedQueue, DistributedQueue])
def test_a_folder_that_was_removed_while_it_was_empty_is_made_again(
    make: Make, session: Session, kind: Callable[..., Any]
) -> None:
    queue = make(kind)
    put = queue.offer if kind is SimpleDistributedQueue else queue.put
    item = b"x" if kind is SimpleDistributedQueue else "x"
    put(item)
    assert queue.poll(30) is not None
    assert queue.poll(0) is None
    session.open().delete("/queue")
    taken: list[Any] = []
    taking = threading.Thread(target=lambda: taken.append(queue.poll(20)))
    taking.start()
    (make(kind).offer if kind is SimpleDistributedQueue else make(kind).put)(item)
    taking.join(30)
    assert taken != [None]
    session.open().delete("/queue")
    # The new folder has had as many children as the old one.
    put(item)
    assert queue.size() == 1
    assert queue.poll(0) is not None
