"""Terms that end before they start, and answers about an older term during a new one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from celery.worker.request import Request
from kombu import pools

import celery_dq
from celery_dq.clock import ManualClock
from celery_dq.keys import PartitionKeys
from celery_dq.leadership.career import Career
from celery_dq.leadership.redis_election import RedisElection, RedisLines
from celery_dq.options.sections import SingletonOptions
from celery_dq.other_brokers.singleton_sequencer import (
    SequencedSingletonStep,
    SingletonMessage,
    SingletonSequencer,
)
from celery_dq.singleton.guard import Guard
from celery_dq.singleton.leaderships import WorkerLeaderships
from celery_dq.testing.sqlite_broker import SqlitePartition
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.zookeeper.fetcher import ZooKeeperFetcher
from celery_dq.worker.singleton import BrokerFence

QUEUE = "ledger"
SESSION_S = 30.0
LEASE_S = 4.0


@pytest.fixture
def app(redis_url: str) -> Iterator[Any]:
    with Celery("posting", broker=f"dq-{redis_url}", set_as_current=False) as app:
        yield celery_dq.setup(app)
    pools.reset()


class Diary(Career[Any]):
    """A career that records its calls."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def inaugurate(self, token: int) -> None:
        self.lines.append(f"inaugurated with {token}")

    def hand_over(self) -> None:
        self.lines.append("handed over")


class ContestedFence(BrokerFence):
    """A fence that a rival raises once, after this worker has read its token."""

    rivals = 1

    def raise_to(self, queue: str, token: int) -> int:
        if self.rivals:
            self.rivals -= 1
            assert super().raise_to(queue, token + 5) == token + 5
        return super().raise_to(queue, token)


@pytest.mark.logged_error("is fenced with token 6, above this worker's 1")
def test_a_fence_that_is_refused_ends_the_term_before_it_is_inaugurated(app: Any, redis_url: str) -> None:
    diary = Diary()
    with redis.Redis.from_url(redis_url, socket_timeout=20) as client:
        leaderships = WorkerLeaderships(
            {QUEUE: SingletonOptions(QUEUE)},
            lambda queue: RedisElection(client, PartitionKeys("online", queue), "w", SESSION_S),
            ContestedFence(app, app.dq.options),
            Guard([QUEUE]),
            careers={QUEUE: diary},
            kills=False,
            lines=RedisLines(client, lambda queue: PartitionKeys("online", queue), SESSION_S),
        )
        seen: list[int] = []
        leaderships.add_listener(lambda: seen.append(leaderships.term_token(QUEUE)))
        leaderships.volunteer(QUEUE)
        try:
            # The refused term had token 1; the next one is above the rival's 6.
            assert wait_until(lambda: leaderships.term_token(QUEUE), 30) == 7
            assert diary.lines == ["inaugurated with 7"]
        finally:
            assert leaderships.close(30)
    assert diary.lines == ["inaugurated with 7", "handed over"]
    assert set(seen) <= {0, 7}


@pytest.fixture
def broker_url(request: pytest.FixtureRequest, redis_url: str, tmp_path: Path) -> str:
    """The URL of a broker: by default with Celery's own transport, else one whose thread sends the acks."""
    kind = getattr(request, "param", "redis")
    if kind == "sqlite":
        return f"dq-sqlite:///{tmp_path / 'queues.sqlite'}"
    if kind == "zookeeper":
        return f"dq-zookeeper://{request.getfixturevalue('zookeeper').hosts}/{tmp_path.name}"
    if kind == "amqp":
        return str(request.getfixturevalue("rabbitmq_server").url())
    return redis_url


@pytest.fixture
def sequencer(broker_url: str, redis_url: str) -> Iterator[SingletonSequencer]:
    """The sequencer of a worker that was not started."""
    with Celery("posting", broker=broker_url, set_as_current=False) as app:
        app.conf.update(
            dq_singleton_queues=[QUEUE], dq_election=redis_url, dq_lease=LEASE_S, task_default_queue=QUEUE
        )
        celery_dq.setup(app)
        worker: Any = app.Worker(pool="solo")
        (step,) = (step for step in worker.consumer.steps if isinstance(step, SequencedSingletonStep))
        assert step._sequencer is not None
        yield step._sequencer


def test_a_worker_that_was_cut_off_in_an_older_term_is_not_cut_off_at_once_in_a_new_one(
    sequencer: SingletonSequencer,
) -> None:
    clock = sequencer._clock = ManualClock()
    assert not sequencer.is_cut_off(QUEUE, 1)
    sequencer.stop()  # the connection is lost
    assert not sequencer.is_cut_off(QUEUE, 1)
    clock.advance(LEASE_S)
    assert sequencer.is_cut_off(QUEUE, 1)
    # The worker is elected again, because there is no other worker, and leads for a whole lease.
    assert not sequencer.is_cut_off(QUEUE, 2)
    clock.advance(LEASE_S - 0.5)
    assert not sequencer.is_cut_off(QUEUE, 2)
    clock.advance(0.5)
    assert sequencer.is_cut_off(QUEUE, 2)


def test_a_message_sent_after_the_end_of_the_term_is_released(
    sequencer: SingletonSequencer, redis_url: str
) -> None:
    queue, consumer = sequencer._queues[QUEUE], sequencer._consumer
    consumer.app.send_task("post", (1,))
    with consumer.app.connection_for_read() as consumer.connection, redis.Redis.from_url(redis_url) as client:
        sequencer._open(queue, 1)
        source, get = queue.source, queue.source.get

        def get_then_end(**options: Any) -> Any:
            message = get(**options)
            # Another greenlet closes the queue while this one waits for the answer.
            sequencer._close(queue)
            return message

        source.get = get_then_end
        assert client.llen(QUEUE) == 1
        sequencer._ask(queue)
        assert not queue.held
        assert client.llen(QUEUE) == 1
    consumer.connection = None


class LateAnswers:
    """Keeps a fetcher's thread from answering: the acks are under way, and not pending any more."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.may_answer = threading.Event()

    def delay(self, patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        method = getattr(owner, name)

        def delayed(self: Any, first: Any, *args: Any, **options: Any) -> Any:
            if first:  # acks, not a round without any
                late.asked.set()
                assert late.may_answer.wait(60)
            return method(self, first, *args, **options)

        late = self
        patch.setattr(owner, name, delayed)


@pytest.mark.parametrize("broker_url", ["sqlite", "zookeeper"], indirect=True)
@pytest.mark.parametrize("end", ["released", "acknowledged"])
def test_a_term_is_busy_until_the_broker_has_confirmed_the_end_of_its_message(
    sequencer: SingletonSequencer, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, consumer = sequencer._queues[QUEUE], sequencer._consumer
    late = LateAnswers()
    for owner, name in (
        (SqlitePartition, "release"),
        (SqlitePartition, "ack"),
        (ZooKeeperFetcher, "_end_outcomes"),
    ):
        late.delay(monkeypatch, owner, name)
    consumer.app.send_task("post", (1,))
    with consumer.app.connection_for_read() as consumer.connection:
        sequencer._open(queue, 1)
        message = wait_until(lambda: queue.source.get(), 30)
        queue.held.append(message)
        if end == "acknowledged":
            queue.held.clear()
            message.ack()
        sequencer._close(queue)
        sequencer._release(queue)
        assert sequencer.is_busy(QUEUE, 1)
        assert late.asked.wait(30)
        assert sequencer.is_busy(QUEUE, 1)
        assert not sequencer.is_busy(QUEUE, 2)
        late.may_answer.set()
        wait_until(lambda: not sequencer.is_busy(QUEUE, 1), 30)
    consumer.connection = None


@pytest.mark.parametrize("broker_url", ["amqp"], indirect=True)
def test_a_term_is_busy_while_its_broker_may_still_send(sequencer: SingletonSequencer) -> None:
    """The loop, which cancels the consumer, may be blocked by a task or by a soft shutdown."""
    queue, consumer = sequencer._queues[QUEUE], sequencer._consumer
    with consumer.app.connection_for_read() as consumer.connection:
        sequencer._open(queue, 1)
        assert sequencer.is_busy(QUEUE, 1)
        assert not sequencer.is_busy(QUEUE, 2)
        sequencer._close(queue)
        assert not sequencer.is_busy(QUEUE, 1)
    consumer.connection = None


def task_that_waits(app: Any) -> Any:
    """Return a task with one message, which must not run."""

    def run(number: int) -> None:
        raise AssertionError(f"{number} runs")

    post = app.task(name="post", shared=False)(run)
    post.delay(1)
    return post


def test_a_message_that_the_pool_is_offered_after_its_term_goes_back(
    sequencer: SingletonSequencer, redis_url: str
) -> None:
    queue, consumer, over = sequencer._queues[QUEUE], sequencer._consumer, list[SingletonMessage]()
    app, post = consumer.app, task_that_waits(consumer.app)
    with app.connection_for_read() as consumer.connection, redis.Redis.from_url(redis_url) as client:
        sequencer._open(queue, 1)
        sequencer._ask(queue)
        message = queue.held.popleft()
        stands = iter([False])
        message_of_term = SingletonMessage(message, QUEUE, 1, stands.__next__, over.append)
        request = Request(message, app=app, task=post)
        # The request has waited for a slot of the pool, and its term was not checked in the meantime.
        assert message_of_term.take(request)
        assert client.llen(QUEUE) == 0
        consumer.controller._process_task(request)
        assert over == [message_of_term]
        assert client.llen(QUEUE) == 1
    consumer.connection = None


class UnstartableRequest(Request):
    """A request that Celery fails to pass to the pool, as with a result backend that is down."""

    def execute_using_pool(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the result backend is down")


@pytest.mark.parametrize("waited", [True, False])
def test_a_message_that_fails_on_its_way_to_the_pool_goes_back_if_the_error_stops_no_worker(
    sequencer: SingletonSequencer, redis_url: str, waited: bool
) -> None:
    queue, consumer, over = sequencer._queues[QUEUE], sequencer._consumer, list[SingletonMessage]()
    app, post = consumer.app, task_that_waits(consumer.app)
    released: list[bool] = []
    consumer.controller._quick_release = lambda: released.append(True)
    with app.connection_for_read() as consumer.connection, redis.Redis.from_url(redis_url) as client:
        sequencer._open(queue, 1)
        sequencer._ask(queue)
        message = queue.held.popleft()
        message_of_term = SingletonMessage(message, QUEUE, 1, lambda: True, over.append)
        # A request that waits for a slot is passed to the pool in the callback of another task.
        queue.running, queue.advancing = message_of_term, not waited
        request = UnstartableRequest(message, app=app, task=post)
        assert message_of_term.take(request)
        with pytest.raises(RuntimeError):
            consumer.controller._process_task(request)
        assert over == [message_of_term] * waited
        assert client.llen(QUEUE) == waited
        assert released == [True]
    consumer.connection = None
