"""Led queues on brokers that cannot refuse a stale token: the guard stops before each message."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from celery_dq.testing.rabbitmq import RabbitMQServer
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.singleton.bank import QUEUE
from tests.singleton.office import DEADLINE_S, SHORT_S, Bank
from tests.workers import ROOT


@pytest.fixture
def plain(open_bank: Callable[..., Bank], redis_server: RedisServer) -> Bank:
    """A bank on Celery's own Redis transport; the same server holds the election, in another database."""
    return plain_bank(open_bank, redis_server)


@pytest.fixture
def hasty(open_bank: Callable[..., Bank], redis_server: RedisServer) -> Bank:
    """One whose leader is missed soon."""
    return plain_bank(open_bank, redis_server, dq_election_session=SHORT_S)


def plain_bank(open_bank: Callable[..., Bank], redis_server: RedisServer, **conf: Any) -> Bank:
    # An election of its own: who was killed in another test may lead there for a while.
    environment = {"dq_environment": "sandbox", "dq_key_prefix": f"t{uuid.uuid4().hex[:8]}"}
    return open_bank(broker="stock", election=redis_server.url(0), **environment, **conf)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_messages_run_one_after_the_other_with_the_token(plain: Bank, pool: str) -> None:
    posted = plain.post(range(10), task="post_late") + plain.post(range(10, 20))
    with plain.worker(pool=pool, concurrency=4):
        assert plain.finished(20) == posted
    assert plain.overlaps() == 0
    tokens = {entry.token for entry in plain.book.entries()}
    assert len(tokens) == 1
    assert min(tokens) > 0


def test_a_killed_leader_is_replaced(hasty: Bank) -> None:
    with hasty.worker() as first:
        hasty.post(range(2))
        hasty.finished(2)
        with hasty.worker():
            hasty.send("hold", 2)
            hasty.wait_started(2)
            hasty.post(range(3, 8))
            children = first.children()
            assert first.process is not None
            first.process.kill()
            # Acknowledged when it began: it is not run again.
            assert hasty.finished(7) == [0, 1, 3, 4, 5, 6, 7]
            for child in children:
                child.wait(30)  # the guard's alarm has ended them
    assert hasty.book.refused() == []


def test_a_paused_leader_starts_nothing_when_it_goes_on(hasty: Bank) -> None:
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
            # What the stopped one had received is its own until its broker's visibility timeout.
            hasty.finished(2 + 3)
            # For it, and for who runs it again.
            hasty.book.release("2", 2)
            for process in processes:
                process.resume()
            hasty.post(range(8, 10))
            # The one that was running may come back by now.
            wait_until(lambda: 9 in hasty.book.numbers("finish"), DEADLINE_S)
            assert [each for each in hasty.book.numbers("finish") if each > 4] == [5, 6, 7, 8, 9]
    tokens = [entry.token for entry in hasty.book.entries("start")]
    assert tokens == sorted(tokens)
    assert hasty.book.refused() == []


def test_who_is_told_to_consume_no_more_hands_over(plain: Bank) -> None:
    with plain.worker(), plain.worker():
        leader = plain.leader(2)
        plain.post(range(3))
        plain.finished(3)
        plain.app.control.cancel_consumer(QUEUE, destination=[leader], reply=True, timeout=30.0)
        plain.post(range(3, 6))
        assert plain.finished(6) == list(range(6))
        assert plain.leader(2) != leader


def test_the_memory_broker_has_leaders_too(redis_url: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.singleton.memory", redis_url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
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
        dq_election_session=SHORT_S,
    )
    with bank.worker(pool, 2, queues=[queue]) as first:
        posted = bank.post(range(10))
        assert bank.finished(10) == posted
        with bank.worker(pool, 2, queues=[queue]):
            bank.send("hold_late", 10)
            bank.wait_started(10)
            bank.post(range(11, 20))
            assert first.process is not None
            first.process.kill()
            bank.wait_started(10, times=2)
            # One for the dead, if their connection has not been missed.
            bank.book.release("10", 2)
            assert bank.finished(20) == list(range(20))
    assert bank.book.refused() == []
    assert bank.overlaps() <= 1
