"""Led queues on brokers that cannot refuse a stale token: the guard stops before each message."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable

import psutil
import pytest

from celery_dq.testing.rabbitmq import RabbitMQServer
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.singleton.bank import QUEUE
from tests.singleton.office import Bank
from tests.workers import ROOT


@pytest.fixture
def plain(open_bank: Callable[..., Bank], redis_server: RedisServer) -> Bank:
    """A bank on Celery's own Redis transport; the same server holds the election, in another database."""
    return open_bank(broker="stock", election=redis_server.url(0), dq_environment="sandbox")


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_messages_run_one_after_the_other_with_the_token(plain: Bank, pool: str) -> None:
    posted = plain.post(range(10), task="post_late") + plain.post(range(10, 20))
    with plain.worker(pool=pool, concurrency=4):
        assert plain.finished(20, 40) == posted
    assert plain.overlaps() == 0
    tokens = {entry.token for entry in plain.book.entries()}
    assert len(tokens) == 1
    assert min(tokens) > 0


def test_a_killed_leader_is_replaced(plain: Bank) -> None:
    with plain.worker() as first:
        plain.post(range(2))
        plain.finished(2)
        with plain.worker():
            plain.post(range(2, 3), seconds=4)
            plain.wait_started(2)
            plain.post(range(3, 8))
            children = first.children()
            assert first.process is not None
            first.process.kill()
            # Acknowledged when it began: it is not run again.
            assert plain.finished(7, 30) == [0, 1, 3, 4, 5, 6, 7]
            for child in children:
                child.wait(10)  # the guard's alarm has ended them
    assert plain.book.refused() == []


def test_a_paused_leader_starts_nothing_when_it_goes_on(plain: Bank) -> None:
    with plain.worker() as first:
        plain.post(range(2))
        plain.finished(2)
        with plain.worker():
            plain.post(range(2, 3), task="post_late", seconds=1.0)
            plain.wait_started(2)
            plain.post(range(3, 5))
            processes = [psutil.Process(first.pid), *first.children()]
            for process in processes:
                process.suspend()
            plain.post(range(5, 8))
            # What the stopped one had received is its own until its broker's visibility timeout.
            plain.finished(2 + 3, 30)
            for process in processes:
                process.resume()
            plain.post(range(8, 10))
            # The one that was running may come back by now.
            wait_until(lambda: 9 in plain.book.numbers("finish"), 30)
            assert [each for each in plain.book.numbers("finish") if each > 4] == [5, 6, 7, 8, 9]
    tokens = [entry.token for entry in plain.book.entries("start")]
    assert tokens == sorted(tokens)
    assert plain.book.refused() == []


def test_who_is_told_to_consume_no_more_hands_over(plain: Bank) -> None:
    with plain.worker(), plain.worker():
        leader = plain.leader()
        plain.post(range(3))
        plain.finished(3)
        plain.app.control.cancel_consumer(QUEUE, destination=[leader], reply=True, timeout=2.0)
        plain.post(range(3, 6))
        assert plain.finished(6) == list(range(6))
        assert plain.leader() != leader


def test_the_memory_broker_has_leaders_too(redis_url: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.singleton.memory", redis_url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [*map(str, range(5)), "token", "1"]


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_on_amqp_a_killed_leader_is_replaced_and_nothing_is_lost_or_reordered(
    open_bank: Callable[..., Bank], redis_server: RedisServer, rabbitmq_server: RabbitMQServer, pool: str
) -> None:
    queue = f"ledger-{uuid.uuid4().hex[:8]}"
    bank = open_bank(
        broker="stock",
        election=redis_server.url(0),
        broker_url=rabbitmq_server.url(),
        task_default_queue=queue,
        dq_singleton_queues=[queue],
    )
    with bank.worker(pool, 2, queues=[queue]) as first:
        posted = bank.post(range(10))
        assert bank.finished(10, 40) == posted
        with bank.worker(pool, 2, queues=[queue]):
            bank.post(range(10, 11), task="post_late", seconds=2)
            bank.wait_started(10)
            bank.post(range(11, 20))
            assert first.process is not None
            first.process.kill()
            assert bank.finished(20, 40) == list(range(20))
    assert bank.book.refused() == []
    assert bank.overlaps() <= 1
