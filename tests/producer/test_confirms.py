"""Buffered calls on RabbitMQ, with publisher confirms."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery import Celery
from kombu import Connection, Consumer, Queue

import celery_dq
from celery_dq.producer.kombu_sender import Confirms, Nacked
from celery_dq.testing.processes import is_free
from celery_dq.testing.waiting import wait_until
from tests.apps import DQCelery
from tests.broker.proxy import Proxy
from tests.rabbitmq import RabbitMQServer

#: Bytes of the largest message that the server takes.
LIMIT = 100_000


class Shop:
    """An app whose calls go to a queue of the test."""

    def __init__(self, url: str, folder: Path, queue: str) -> None:
        plain = Celery("shop", broker=url, set_as_current=False)
        plain.conf.update(
            dq_buffer=True,
            dq_buffer_folder=str(folder),
            dq_buffer_linger="1ms",
            dq_buffer_batch_size=50,
            task_routes={"notify": queue},
            dq_publish_timeout="12s",  # a silent broker is noticed after a third of it
        )
        self.app: DQCelery = celery_dq.setup(plain)
        self.queue = queue
        self.called: list[str] = []
        self.delivered: list[str] = []
        self.app.dq.buffer.on_delivered(self.delivered.extend)

        def notify(number: int) -> None: ...

        self.task = self.app.task(name="notify", shared=False, ignore_result=True)(notify)

    def call(self, times: int) -> None:
        for number in range(times):
            self.called.append(self.task.apply_async((number,)).id)

    def close(self) -> None:
        self.app.dq.buffer.close(20)
        self.app.close()


def drain(url: str, queue: str) -> list[str]:
    """Delete a queue; return the ids of its tasks in order."""
    ids: list[str] = []
    with Connection(url) as connection:
        channel: Any = connection.channel()
        _, count, _ = channel.queue_declare(queue, passive=True)
        with Consumer(
            channel, [Queue(queue)], no_ack=True, on_message=lambda message: ids.append(message.headers["id"])
        ):
            while len(ids) < count:
                connection.drain_events(timeout=30)
        channel.queue_delete(queue)
    return ids


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitMQServer]:
    """A server for this file, which may stop it; it takes messages of 100 kB."""
    with RabbitMQServer(config={"max_message_size": LIMIT}) as server:
        yield server
        port, folder = server.port, server.folder
    # The server leaves nothing behind.
    assert is_free(port)
    assert not folder.exists()


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> str:
    return f"confirms-{abs(hash(request.node.name)):x}"


@pytest.fixture
def shop(server: RabbitMQServer, tmp_path: Path, queue: str) -> Iterator[Shop]:
    with closing(Shop(server.url(), tmp_path / "spill", queue)) as made:
        yield made


@pytest.fixture
def proxy(server: RabbitMQServer) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def distant(proxy: Proxy, tmp_path: Path, queue: str) -> Iterator[Shop]:
    """A shop whose broker is behind a proxy, and has got its first messages."""
    url = f"amqp://guest:guest@127.0.0.1:{proxy.port}//"
    with closing(Shop(url, tmp_path / "spill", queue)) as shop:
        shop.call(10)
        assert shop.app.dq.buffer.flush(40) == 0
        yield shop


def test_calls_arrive_once_and_in_order(server: RabbitMQServer, shop: Shop) -> None:
    shop.call(500)
    assert shop.app.dq.buffer.flush(40) == 0
    wait_until(lambda: shop.delivered == shop.called, 30)  # the callback may run after the end of the flush
    assert drain(server.url(), shop.queue) == shop.called


def test_an_unconfirmed_message_is_sent_again(server: RabbitMQServer, proxy: Proxy, distant: Shop) -> None:
    """Lose the confirms of a batch that the broker has stored."""
    proxy.drop_answers_to, proxy.drops_left = b"notify", 1
    distant.call(200)
    assert distant.app.dq.buffer.flush(40) == 0
    assert proxy.dropped == 1
    found = Counter(drain(server.url(), distant.queue))
    assert set(found) == set(distant.called)
    wait_until(lambda: set(distant.delivered) == set(distant.called), 30)
    # Only the messages in flight at the loss of the connection, one batch at most.
    assert sum(found.values()) - len(found) <= 50


def test_a_broker_that_hangs_before_it_confirms(server: RabbitMQServer, proxy: Proxy, distant: Shop) -> None:
    proxy.black_hole.set()
    started = time.monotonic()
    distant.call(200)
    # A call that waits for an answer would wait for four seconds.
    assert time.monotonic() - started < 3.5
    wait_until(lambda: distant.app.dq.buffer.inspect().last_error, 40)
    assert len(distant.app.dq.buffer) == 200
    proxy.black_hole.clear()
    proxy.cut_all()
    assert distant.app.dq.buffer.flush(30) == 0
    assert list(dict.fromkeys(drain(server.url(), distant.queue))) == distant.called


def stopped_in_the_midst(server: RabbitMQServer, shop: Shop) -> bool:
    """Pause the broker; return whether the buffer holds more than the batch in flight."""
    shop.call(200)
    server.pause()
    if len(shop.app.dq.buffer) > 50:
        return True
    server.resume()
    return False


def test_a_broker_that_is_killed_between_publish_and_confirm_loses_nothing(
    server: RabbitMQServer, shop: Shop
) -> None:
    shop.call(20)
    assert shop.app.dq.buffer.flush(40) == 0
    shop.call(2_000)
    wait_until(lambda: len(shop.delivered) > 100, 40, interval_s=0.001)
    wait_until(lambda: stopped_in_the_midst(server, shop), 40)
    pid = server.pid
    server.kill()
    assert not psutil.pid_exists(pid)
    assert len(shop.delivered) < len(shop.called)
    shop.call(100)
    server.start()
    assert shop.app.dq.buffer.flush(60) == 0
    found = drain(server.url(), shop.queue)
    assert list(dict.fromkeys(found)) == shop.called
    assert len(found) - len(shop.called) <= 50


def test_a_batch_is_confirmed_up_to_the_first_message_that_the_broker_refuses(
    server: RabbitMQServer, queue: str
) -> None:
    narrow = Queue(queue, queue_arguments={"x-max-length": 2, "x-overflow": "reject-publish"})
    with Connection(server.url()) as connection:
        narrow(connection.default_channel).declare()
        channel: Any = connection.channel()
        confirms = Confirms(channel)
        confirms.begin()
        for number in range(4):
            channel.basic_publish(
                channel.prepare_message(b"%d" % number, content_encoding="binary"), routing_key=queue
            )
            confirms.published()
        with pytest.raises(Nacked, match="did not accept 2 of"):
            confirms.wait(partial(connection.drain_events, timeout=20))
        assert confirms.confirmed == 2
        channel.queue_delete(queue)


def test_only_the_message_above_the_limit_of_the_broker_is_not_sent(
    server: RabbitMQServer, shop: Shop
) -> None:
    shop.call(20)
    poison = shop.task.apply_async(("x" * 2 * LIMIT,))
    shop.call(20)
    assert shop.app.dq.buffer.flush(40) == 0
    (kept,) = shop.app.dq.buffer.quarantine()
    assert [message.id for message in kept.messages] == [poison.id]
    wait_until(lambda: shop.delivered == shop.called, 30)
    assert list(dict.fromkeys(drain(server.url(), shop.queue))) == shop.called


def test_a_message_that_a_full_queue_refuses_waits_in_the_buffer(
    server: RabbitMQServer, shop: Shop, queue: str
) -> None:
    limited = {"x-max-length": 5, "x-overflow": "reject-publish"}
    shop.app.conf.task_queues = [
        Queue(queue, routing_key=queue, queue_arguments=limited),
        Queue(f"{queue}-other", routing_key=f"{queue}-other"),
    ]
    shop.call(12)
    wait_until(lambda: len(shop.delivered) >= 5, 40)
    wait_until(lambda: "did not accept" in shop.app.dq.buffer.inspect().last_error, 40)
    assert len(shop.app.dq.buffer) == 12 - len(shop.delivered)
    other = shop.task.apply_async((0,), queue=f"{queue}-other").id
    wait_until(lambda: other in shop.delivered, 40)  # its lane does not wait
    found: list[str] = []
    with Connection(server.url()) as connection:
        channel: Any = connection.channel()

        def all_there() -> bool:
            while (message := channel.basic_get(queue, no_ack=True)) is not None:
                found.append(message.headers["id"])
            return set(found) == set(shop.called)

        wait_until(all_there, 30)
        channel.queue_delete(queue)
    # The queue got room between two messages of a batch: the broker refused the first and took the second.
    assert found[:5] == shop.called[:5]
    assert shop.app.dq.buffer.flush(40) == 0
    assert drain(server.url(), f"{queue}-other") == [other]
