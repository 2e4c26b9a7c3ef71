"""Singleton queues on brokers that cannot refuse a stale token: the guard stops before each message."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.preloaded import run_python
from tests.rabbitmq import RabbitMQServer
from tests.singleton.posting_app import QUEUE
from tests.singleton.posting_workers import DEADLINE_S, SHORT_S, PostingWorkers


@pytest.fixture
def hasty(open_plain: Callable[..., PostingWorkers]) -> PostingWorkers:
    """A posting app with a short session, so that a missing leader is replaced soon."""
    return open_plain(dq_election_session=SHORT_S)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_messages_run_one_after_the_other_with_the_token(plain: PostingWorkers, pool: str) -> None:
    posted = plain.post(range(10), task="post_late") + plain.post(range(10, 20))
    with plain.worker(pool=pool, concurrency=4):
        assert plain.finished(20) == posted
    assert plain.overlaps() == 0
    tokens = {entry.token for entry in plain.book.entries()}
    assert len(tokens) == 1
    assert min(tokens) > 0


def test_a_killed_leader_is_replaced(hasty: PostingWorkers) -> None:
    with hasty.worker() as first:
        hasty.post(range(2))
        hasty.finished(2)
        with hasty.worker():
            hasty.send("hold", 2)
            hasty.wait_started(2)
            hasty.post(range(3, 8))
            children = first.children()
            first.stop(signal.SIGKILL)
            # The message was acknowledged at its start, so it does not run again.
            assert hasty.finished(7) == [0, 1, 3, 4, 5, 6, 7]
            for child in children:
                child.wait(30)  # the guard's alarm has killed them
    assert hasty.book.refused() == []


def test_a_paused_leader_starts_nothing_when_it_goes_on(hasty: PostingWorkers) -> None:
    with hasty.worker() as first:
        hasty.post(range(2))
        hasty.finished(2)
        with hasty.worker():
            hasty.send("hold_late", 2)
            hasty.wait_started(2)
            hasty.post(range(3, 5))
            processes = [psutil.Process(first.pid), *first.children()]
            for process in processes:
                process.suspend()
            hasty.post(range(5, 8))
            # The stopped leader keeps its received messages until the visibility timeout of its broker.
            hasty.finished(2 + 3)
            # One release is for the stopped leader, and one for the worker that runs the message again.
            hasty.book.release("2", 2)
            for process in processes:
                process.resume()
            hasty.post(range(8, 10))
            # The message that was running may come back by now.
            wait_until(lambda: 9 in hasty.book.numbers("finish"), DEADLINE_S)
            assert [each for each in hasty.book.numbers("finish") if each > 4] == [5, 6, 7, 8, 9]
    tokens = [entry.token for entry in hasty.book.entries("start")]
    assert tokens == sorted(tokens)
    assert hasty.book.refused() == []


def test_a_worker_that_stops_to_consume_hands_over(plain: PostingWorkers) -> None:
    with plain.worker(), plain.worker():
        leader = plain.leader(2)
        plain.post(range(3))
        plain.finished(3)
        plain.app.control.cancel_consumer(QUEUE, destination=[leader], reply=True, timeout=30.0)
        plain.post(range(3, 6))
        assert plain.finished(6) == list(range(6))
        assert plain.leader(2) != leader


def test_the_memory_broker_has_leaders_too(redis_url: str) -> None:
    run = run_python("-m", "tests.singleton.memory", redis_url, timeout_s=110)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [*map(str, range(5)), "token", "1"]


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_on_amqp_a_killed_leader_is_replaced_and_nothing_is_lost_or_reordered(
    open_plain: Callable[..., PostingWorkers], rabbitmq_server: RabbitMQServer, pool: str
) -> None:
    queue = f"ledger-{uuid.uuid4().hex[:8]}"
    posting = open_plain(
        broker_url=rabbitmq_server.url(),
        task_default_queue=queue,
        dq_singleton_queues=[queue],
        dq_election_session=SHORT_S,
    )
    with posting.worker(pool, 2, queues=[queue]) as first:
        posted = posting.post(range(10))
        assert posting.finished(10) == posted
        with posting.worker(pool, 2, queues=[queue]):
            posting.send("hold_late", 10)
            posting.wait_started(10)
            posting.post(range(11, 20))
            first.stop(signal.SIGKILL)
            posting.wait_started(10, times=2)
            # One release is for the dead worker's run, if the broker has not noticed its closed connection.
            posting.book.release("10", 2)
            assert posting.finished(20) == list(range(20))
    assert posting.book.refused() == []
    assert posting.overlaps() <= 1


@pytest.mark.parametrize("broker", ["redis", "amqp", "zookeeper"])
def test_a_run_covers_the_calls_of_its_key_that_wait_when_it_begins(
    request: pytest.FixtureRequest,
    open_posting: Callable[..., PostingWorkers],
    redis_server: RedisServer,
    broker: str,
) -> None:
    """Of six calls two run: the first, and one for all that came while it ran. Each has a result."""
    queue = f"ledger-{uuid.uuid4().hex[:8]}"
    options = {
        "dq_dedup_url": redis_server.url(0),
        "task_default_queue": queue,
        "dq_singleton_queues": [queue],
    }
    if broker == "amqp":
        options["broker_url"] = request.getfixturevalue("rabbitmq_server").url()
    elif broker == "zookeeper":
        options["broker_url"] = f"dq-zookeeper://{request.getfixturevalue('zookeeper').hosts}/covered"
    posting = open_posting(
        broker="zookeeper" if broker == "zookeeper" else "stock",
        election=redis_server.url(0),
        dq_key_prefix=f"t{uuid.uuid4().hex[:8]}",
        **options,
    )

    app: Any = posting.app

    def waiting() -> int:
        with app.connection_for_write() as connection:
            return int(connection.default_channel.queue_declare(queue, passive=True).message_count)

    with posting.worker(queues=[queue]):
        posting.send("hold", 0)
        posting.wait_started(0)
        calls = [posting.send("hold_keyed", 7), posting.send("post", 1)]
        calls += [posting.send("hold_keyed", 7, ignore_result=ignored) for ignored in (False, True)]
        if broker == "amqp":  # The broker has sent them ahead.
            wait_until(lambda: waiting() == 0, DEADLINE_S)
        posting.book.release("0")
        posting.wait_started(7)
        calls += [posting.send("hold_keyed", 7), posting.send("post", 2)]
        calls += [posting.send("hold_keyed", 7) for _ in range(2)]
        if broker == "amqp":
            wait_until(lambda: waiting() == 0, DEADLINE_S)
        posting.book.release("7", 6)
        for call in calls:
            if not call.ignored:
                call.get(timeout=DEADLINE_S)
        assert posting.book.numbers("start") == [0, 7, 1, 7, 2]
        assert app.dq.dedup[queue].verdicts()["decline"] == 4
    assert posting.overlaps() == 0
    assert posting.book.refused() == []
