"""The behaviour of each kind of queue, with and without locks, on a real ZooKeeper."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from celery_dq.curator.queue import DistributedIdQueue, DistributedQueue
from celery_dq.errors import (
    ConfigurationError,
    InvalidMessage,
    MessageTooLarge,
    QueueClosed,
    QueueEmpty,
    QueueFull,
)
from celery_dq.testing.waiting import wait_until
from celery_dq.zookeeper.session import Session
from tests.curator.collecting import Collector
from tests.doubles.thread_limit import no_more_threads

Make = Callable[..., Any]
LOCKS = "/locks"
both = pytest.mark.parametrize("lock_path", [None, LOCKS], ids=["deleting", "locking"])


@both
def test_first_in_first_out(make: Make, lock_path: str | None, session: Session) -> None:
    seen = Collector()
    make(DistributedQueue, lock_path=lock_path, consumer=seen).start()
    producer = make(DistributedQueue)
    producer.put_each(list(range(150)))
    for number in range(150, 160):
        producer.put(number)
    assert seen.wait(160) == list(range(160))
    wait_until(lambda: producer.size() == 0)
    if lock_path:
        wait_until(lambda: session.open().get_children(LOCKS) == [])


@both
def test_several_consumers_take_each_item_once(make: Make, lock_path: str | None) -> None:
    seen = Collector()
    producer = make(DistributedQueue)
    producer.put_each(list(range(300)))
    for _each in range(3):
        make(DistributedQueue, lock_path=lock_path, consumer=seen).start()
    wait_until(lambda: producer.size() == 0, 30)
    assert sorted(seen.wait(300)) == list(range(300))


@both
def test_items_put_together_are_consumed_together(make: Make, lock_path: str | None) -> None:
    producer = make(DistributedQueue)
    producer.put_multi([*"abc"])
    producer.put_multi([])
    producer.put("d")
    assert producer.size() == 2
    seen = Collector()
    make(DistributedQueue, lock_path=lock_path, consumer=seen).start()
    assert seen.wait(4) == [*"abcd"]


@pytest.mark.logged_error("The item is requeued at the end of the queue")
@both
def test_a_failed_item_is_requeued_last_in_line(make: Make, lock_path: str | None) -> None:
    seen = Collector(fail=lambda item: item == "bad" and "bad" not in seen.failed)
    queue = make(DistributedQueue, lock_path=lock_path)
    queue.put_each(["bad", "good"])
    make(DistributedQueue, lock_path=lock_path, consumer=seen).start()
    assert seen.wait(2) == ["good", "bad"]
    wait_until(lambda: queue.size() == 0)


@pytest.mark.logged_error("The item is requeued at the end of the queue")
def test_of_items_put_together_only_the_rest_is_requeued(make: Make) -> None:
    seen = Collector(fail=lambda item: item == "b" and "b" not in seen.failed)
    make(DistributedQueue).put_multi([*"abc"])
    make(DistributedQueue, lock_path=LOCKS, consumer=seen).start()
    assert seen.wait(3) == [*"abc"]


@pytest.mark.logged_error("The item is deleted")
@both
def test_a_failed_item_is_deleted_if_wanted(make: Make, lock_path: str | None) -> None:
    seen = Collector(fail=lambda item: item == "bad")
    queue = make(DistributedQueue)
    queue.put_multi(["bad", "good"])
    make(DistributedQueue, lock_path=lock_path, consumer=seen, on_failure="delete").start()
    assert seen.wait(1) == ["good"]
    wait_until(lambda: queue.size() == 0)
    assert seen.failed == ["bad"]


def test_names_do_not_grow_when_items_come_back(make: Make, session: Session) -> None:
    queue = make(DistributedQueue, lock_path=LOCKS)
    queue.put("x")
    for _each in range(3):
        queue.get(30).requeue()
    (name,) = session.open().get_children("/queue")
    assert name == "queue-0000000003"


@both
def test_an_executor_consumes_several_at_once(make: Make, lock_path: str | None) -> None:
    meeting = threading.Barrier(4)
    seen = Collector()

    def consume(item: int) -> None:
        meeting.wait(30)
        seen(item)

    with ThreadPoolExecutor(4) as executor:
        queue = make(DistributedQueue, lock_path=lock_path, consumer=consume, executor=executor).start()
        make(DistributedQueue).put_each(list(range(20)))
        assert sorted(seen.wait(20)) == list(range(20))
        queue.close()
    assert queue.size() == 0


@pytest.mark.logged_error("The item is deleted")
def test_an_executor_that_was_shut_down_and_a_consumer_that_exits(make: Make) -> None:
    def leave(item: int) -> None:
        raise SystemExit(item)

    queue = make(DistributedQueue, lock_path=LOCKS)
    queue.put(1)
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    broken = make(DistributedQueue, lock_path=LOCKS, consumer=print, executor=executor).start()
    leaving = make(DistributedQueue, lock_path=LOCKS, consumer=leave, on_failure="delete")
    # Neither consumer keeps the item: one releases it, and the other one has failed.
    leaving.start()
    wait_until(lambda: queue.size() == 0, 30)
    queue.put(2)
    wait_until(lambda: queue.size() == 0, 30)
    broken.close()


def test_listeners_learn_of_each_put_once(make: Make) -> None:
    received: list[list[Any]] = []
    queue = make(DistributedQueue)
    queue.on_put(received.append)
    queue.put(1)
    queue.put_multi([2, 3])
    assert received == [[1], [2, 3]]


def test_items_put_in_the_background_are_flushed_and_ordered(make: Make) -> None:
    received: list[list[Any]] = []
    queue = make(DistributedQueue, put_in_background=True)
    queue.on_put(received.append)
    for number in range(1000):
        queue.put(number)
    assert queue.flush(20)
    assert queue.unsent() == []
    assert received == [[number] for number in range(1000)]
    seen = Collector()
    make(DistributedQueue, lock_path=LOCKS, consumer=seen).start()
    assert seen.wait(1000) == list(range(1000))


def test_a_queue_goes_on_after_a_thread_could_not_start(make: Make) -> None:
    queue = make(DistributedQueue, put_in_background=True)
    with no_more_threads(), pytest.raises(RuntimeError):
        queue.put(0)
    queue.put(1)
    assert queue.flush(20)
    seen = Collector()
    consuming = make(DistributedQueue, lock_path=LOCKS, consumer=seen)
    assert consuming.size() == 1  # its session is open
    with no_more_threads(), pytest.raises(RuntimeError):
        consuming.start()
    consuming.start()
    assert seen.wait(1) == [1]


def test_closing_flushes(make: Make) -> None:
    queue = make(DistributedQueue, put_in_background=True)
    for number in range(100):
        queue.put(number)
    queue.close()
    assert make(DistributedQueue).size() == 100
    with pytest.raises(QueueClosed):
        queue.put(1)


def test_a_bounded_queue_makes_producers_wait(make: Make) -> None:
    queue = make(DistributedQueue, max_items=3)
    queue.put_each([0, 1, 2], timeout_s=20)
    with pytest.raises(QueueFull, match="max_items = 3"):
        queue.put(3, timeout_s=0)
    seen = Collector()
    putting = threading.Thread(target=queue.put_each, args=([3, 4, 5, 6],), kwargs={"timeout_s": 20})
    putting.start()
    make(DistributedQueue, lock_path=LOCKS, consumer=seen).start()
    assert seen.wait(7) == list(range(7))
    putting.join(30)


def test_a_bounded_queue_in_the_background(make: Make) -> None:
    queue = make(DistributedQueue, max_items=2, put_in_background=True)
    for number in range(10):
        queue.put(number)
    assert not queue.flush(0.2)
    seen = Collector()
    make(DistributedQueue, lock_path=LOCKS, consumer=seen).start()
    assert seen.wait(10) == list(range(10))
    assert queue.flush(10)


@both
def test_taking_by_hand(make: Make, lock_path: str | None) -> None:
    queue = make(DistributedQueue, lock_path=lock_path)
    assert queue.peek() is None
    assert queue.poll() is None
    with pytest.raises(QueueEmpty):
        queue.get(0.05)
    queue.put_each([1, 2])
    assert queue.peek() == [1]
    with queue.get(30) as received:
        assert received.item == 1
    with pytest.raises(KeyError), queue.get(30) as received:
        raise KeyError(received.item)
    with queue.get(30) as received:
        assert received.item == 2
    assert queue.size() == 0
    waiting = threading.Timer(0.05, make(DistributedQueue).put, [3])
    waiting.start()
    assert queue.get(20).item == 3
    waiting.join()


@both
@pytest.mark.parametrize("first", ["release", "requeue", "finish"])
@pytest.mark.parametrize("then", ["release", "requeue", "finish", "leave"])
def test_an_item_ends_once(make: Make, lock_path: str | None, first: str, then: str) -> None:
    queue = make(DistributedQueue, lock_path=lock_path)
    queue.put("x")
    with queue.get(30) as received:
        getattr(received, first)()
        if then != "leave":
            getattr(received, then)()
    assert queue.size() == (0 if first == "finish" else 1)
    queue.put("y")
    rest = ["y"] if first == "finish" else ["x", "y"]
    assert [queue.get(30).item for _ in rest] == rest


def test_a_negative_timeout_waits_for_no_other_caller(make: Make) -> None:
    queue = make(DistributedQueue)
    waiting = threading.Thread(target=queue.poll, args=(30,))
    waiting.start()
    wait_until(queue._state.get().turn.locked)
    for timeout_s in (-1, -2):
        assert queue.poll(timeout_s) is None
        assert waiting.is_alive()
    queue.put("x")
    waiting.join(30)


def test_a_slow_item_does_not_delay_the_ones_behind_it(make: Make) -> None:
    slow, quick = Collector(), Collector()
    make(DistributedQueue).put_each(list(range(100)))
    busy = make(DistributedQueue, lock_path=LOCKS, consumer=slow).start()
    slow.wait(100)
    # By now, the consumer takes many items at once.
    slow.gate.clear()
    make(DistributedQueue).put_each(list(range(100, 150)))
    assert slow.waiting.wait(30)
    make(DistributedQueue, lock_path=LOCKS, consumer=quick).start()
    assert len(quick.wait(49)) == 49
    slow.gate.set()
    assert sorted(slow.wait(101) + quick.items) == list(range(150))
    busy.close()


def test_a_serializer_of_the_user_and_items_that_it_cannot_read(make: Make, session: Session) -> None:
    make(DistributedQueue, serializer="bytes").put(b"\xff no text")
    session.open().create("/queue/queue-", b"junk", sequence=True)
    session.open().create("/queue/stranger", b"")
    texts = make(DistributedQueue, serializer="text", lock_path=LOCKS)
    deleting = make(DistributedQueue, serializer="text")
    texts.put("text")
    assert deleting.get(30).item == "text"
    assert texts.poll(0.2) is None
    assert texts.size() == 3
    assert make(DistributedQueue, serializer="bytes", lock_path=LOCKS).get(30).item == b"\xff no text"
    with pytest.raises(InvalidMessage, match="is not a str"):
        texts.put(7)
    with pytest.raises(InvalidMessage, match="is not bytes"):
        make(DistributedQueue, serializer="bytes").put("x")
    with pytest.raises(InvalidMessage, match="cannot be written as JSON"):
        make(DistributedQueue).put(object())


def test_too_large_an_item_is_refused_before_it_breaks_the_connection(make: Make) -> None:
    queue = make(DistributedQueue, serializer="bytes")
    with pytest.raises(MessageTooLarge, match="ZooKeeper takes 1048575"):
        queue.put(b"x" * 2**20)
    queue.put_each([b"x" * 600_000] * 3)
    queue.put(b"x" * 1_048_000)
    assert queue.size() == 4
    assert len(queue.get(30).item) == 600_000


def test_unusable_options_are_refused(hosts: str) -> None:
    for options, message in (
        ({"path": "queue"}, "path = 'queue'"),
        ({"path": "/"}, "path = '/'"),
        ({"path": "/dq"}, "celery-dq's own nodes"),
        ({"lock_path": "/dq/online/locks"}, "lock_path = '/dq/online/locks' is a place of"),
        ({"lock_path": "/queue"}, "lock_path = '/queue'"),
        ({"on_failure": "retry"}, "on_failure = 'retry'"),
        ({"max_items": 0}, "max_items = 0"),
        ({"serializer": "pickle"}, "serializer = 'pickle'"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            DistributedQueue(hosts, **{"path": "/queue", **options})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="has a consumer"):
        DistributedQueue(hosts, "/queue", consumer=print).poll()


@both
def test_items_are_removed_by_id(make: Make, lock_path: str | None) -> None:
    queue = make(DistributedIdQueue, lock_path=lock_path)
    for item_id in ("a/b", "a|b", "a_b", "a/b"):
        queue.put(f"item {item_id}", item_id)
    assert queue.remove("a/b") == 2
    assert queue.remove("none") == 0
    assert sorted(queue.ids()) == ["a_b", "a|b"]
    # The ids do not change the order.
    assert [queue.get(30).item for _each in range(2)] == ["item a|b", "item a_b"]
