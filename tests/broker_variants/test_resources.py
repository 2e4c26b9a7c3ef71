"""File descriptors, threads, connections and memory do not grow over many connections and reconnects."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from celery import Celery
from kombu import Connection, Consumer, Producer, Queue

from celery_dq.testing.servers import RedisServer, wait_until
from celery_dq.transport.redis.consuming.consumer_thread import ConsumerThread
from tests.broker_variants.conftest import OpenCeleryApp
from tests.brokers import DQ
from tests.conformance.kombu_queue import drain_until
from tests.workers import make_app

MIB = 1024 * 1024


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server for this test only, so that its clients can be counted."""
    with RedisServer() as server:
        yield server


def clients(server: RedisServer) -> int:
    """Return the number of connections to the server, without that of this call."""
    return str(server.ask("CLIENT", "LIST")).count("id=") - 1


def open_files() -> int:
    gc.collect()
    return int(psutil.Process().num_fds())


def publish_once(url: str) -> None:
    with Connection(url) as connection:
        Producer(connection.channel()).publish("x", routing_key="resources", serializer="json")


def consume_once(url: str) -> None:
    got: list[object] = []

    def receive(message: Any) -> None:
        got.append(message)
        message.ack()

    with Connection(url) as connection:
        channel = connection.channel()
        Producer(channel).publish("x", routing_key="resources", serializer="json")
        queue = Queue("resources")
        with Consumer(channel, queues=[queue], on_message=receive):
            drain_until(connection, lambda: got)


@pytest.mark.parametrize(("use", "times"), [(publish_once, 200), (consume_once, 60)])
def test_closed_connections_leave_no_resource(
    server: RedisServer, use: Callable[[str], None], times: int
) -> None:
    url = server.url(scheme="dq-redis")
    for _ in range(5):
        use(url)
    threads, files = threading.active_count(), open_files()
    memory = psutil.Process().memory_info().rss
    for _ in range(times):
        use(url)
    # Each connection here has a consumer thread, which ends a moment after its last consumer.
    wait_until(lambda: clients(server) <= 1, 30, what=lambda: f"{clients(server)} connections")
    wait_until(lambda: open_files() <= files + 4, 30, what=lambda: f"{open_files()} files, had {files}")
    wait_until(lambda: threading.active_count() <= threads, 30)
    assert psutil.Process().memory_info().rss - memory < 24 * MIB


def test_closed_channels_leave_no_resource(server: RedisServer) -> None:
    with Connection(server.url(scheme="dq-redis")) as connection:
        default: Any = connection.default_channel
        default.client.ping()
        open_channel: Any = connection.channel
        for _ in range(5):
            open_channel().close()
        files, before = open_files(), clients(server)
        for _ in range(100):
            channel = open_channel()
            Producer(channel).publish("x", routing_key="resources", serializer="json")
            channel.close()
        wait_until(lambda: open_files() <= files + 2, 30, what=lambda: f"{open_files()} files, had {files}")
        wait_until(lambda: clients(server) <= before + 2, 30, what=lambda: f"{clients(server)} connections")


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_worker_that_reconnects_twenty_times_does_not_grow(
    server: RedisServer, open_celery_app: OpenCeleryApp, pool: str
) -> None:
    place = open_celery_app(server.url(scheme="dq-redis"))
    with place.worker(pool) as worker:

        def cut() -> None:
            # The worker notices the cut of its wait at once, and that of an idle connection at its next use.
            wait_until(lambda: "cmd=blpop" in str(server.ask("CLIENT", "LIST")), 30)
            server.ask("CLIENT", "KILL", "TYPE", "normal")
            assert place.send("add", 1, 1).get(timeout=60) == 2

        def connects() -> int:
            return worker.log.count("Connected to dq-redis")

        assert place.send("add", 1, 1).get(timeout=30) == 2
        process = psutil.Process(worker.pid)

        def measure() -> tuple[int, int, int]:
            return process.num_fds(), process.num_threads(), clients(server)

        for _ in range(4):
            cut()
        connected, before, memory = connects(), measure(), process.memory_info().rss
        for _ in range(20):
            cut()
        assert connects() >= connected + 10
        # A cut connection is noticed at its next use, so the counts before may lack a few: a worker at rest
        # has up to 20 files, and 12 a moment after a cut. A leak of one at each reconnect would add 20.
        wait_until(
            lambda: all(now <= then + 10 for now, then in zip(measure(), before, strict=True)),
            30,
            what=lambda: f"files, threads, clients: {measure()}, had {before}",
        )
        assert process.memory_info().rss - memory < 24 * MIB
        wait_until(lambda: "Traceback" not in worker.log.rpartition("Connected to dq-redis")[2], 30)


def runs(thread: ConsumerThread) -> bool:
    """Return whether this consumer thread runs; other ones of the process do not count."""
    return any(
        frame.f_code is ConsumerThread._run.__code__ and frame.f_locals["self"] is thread
        for newest in sys._current_frames().values()
        for frame, _ in traceback.walk_stack(newest)
    )


def test_the_consumer_thread_ends_when_its_broker_stays_away() -> None:
    # Given a consumer with a message in flight, whose server has stopped for good
    with RedisServer() as server:
        conf = {"broker_url": server.url(scheme="dq-redis"), "dq_lease": 1, "task_default_queue": "resources"}
        app: Celery = make_app("given-up", DQ, conf)
        with app.connection_for_read() as connection:
            got: list[object] = []
            channel = connection.channel()
            transport: Any = connection.transport
            thread = transport.context.identity.threads.main
            Producer(channel).publish("x", routing_key="resources", serializer="json")
            with Consumer(channel, queues=[Queue("resources")], on_message=got.append):
                drain_until(connection, lambda: got)
                wait_until(lambda: runs(thread), 30)
                server.kill()
        # Then the consumer thread ends.
        wait_until(lambda: not runs(thread), 30)
        app.close()
