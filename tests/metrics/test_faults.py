"""Metrics of servers that do not answer: the scrape ends in time, and says so."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from celery_dq.clock import ManualClock
from celery_dq.metrics.collector import BrokerState, SharedState
from celery_dq.shared_reading import FRESH_S
from celery_dq.testing.processes import dead_port
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.broker.proxy import Proxy
from tests.doubles.thread_limit import no_more_threads
from tests.integration.shop import send
from tests.metrics.conftest import MakeApp, Metrics, Serve, scrape

TIMEOUT_S = 0.5
#: Far more than the deadline of a scrape, and far less than a socket timeout of the transport.
SOON_S = 10.0


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    with Proxy(redis_server.port) as proxy:
        yield proxy


def scrape_soon(url: str) -> Metrics:
    began = time.monotonic()
    metrics = scrape(url)
    assert time.monotonic() - began < SOON_S
    return metrics


def test_a_dead_broker_is_down(make_app: MakeApp, serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    with dead_port() as port:
        url = serve(make_app(f"dq-redis://127.0.0.1:{port}/0"))
        for _ in range(2):
            metrics = scrape_soon(url)
            assert metrics("celery_dq_up") == 0
            assert metrics.of("celery_dq_queue_messages") == {}
    events = [getattr(each, "event", "") for each in caplog.records]
    assert events.count("metrics_outage_began") == 1


def test_a_silent_broker_is_down_until_it_answers(
    make_app: MakeApp,
    serve: Serve,
    proxy: Proxy,
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = make_app(proxy.url(redis_url), dq_metrics_timeout=TIMEOUT_S)
    url = serve(app)
    assert scrape(url)("celery_dq_up") == 1
    proxy.black_hole.set()
    wait_until(lambda: scrape_soon(url)("celery_dq_up") == 0, 30)
    proxy.black_hole.clear()
    # The connection that got no answer is given up.
    wait_until(lambda: scrape_soon(url)("celery_dq_up") == 1, 30)
    assert "metrics_outage_over" in [getattr(each, "event", "") for each in caplog.records]


def test_a_broker_that_never_answers_a_connection_is_down(
    make_app: MakeApp, serve: Serve, proxy: Proxy, redis_url: str
) -> None:
    proxy.black_hole.set()
    # The thread that reads waits for much longer than a scrape.
    options = {"socket_timeout": 60, "socket_connect_timeout": 60}
    conf: dict[str, Any] = {"broker_transport_options": options, "dq_metrics_timeout": TIMEOUT_S}
    url = serve(make_app(proxy.url(redis_url), **conf))
    for _ in range(2):
        assert scrape_soon(url)("celery_dq_up") == 0


def test_a_reading_that_takes_longer_than_the_timeout_names_the_setting(
    make_app: MakeApp, serve: Serve, proxy: Proxy, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.hold_answers_to, proxy.holds_left = b"SMEMBERS", 1
    conf: dict[str, Any] = {"broker_transport_options": {"socket_timeout": 60}}
    url = serve(make_app(proxy.url(redis_url), dq_metrics_timeout=TIMEOUT_S, **conf))
    assert scrape_soon(url)("celery_dq_up") == 0
    proxy.release_answers.set()
    wait_until(lambda: "longer than dq_metrics_timeout (0.5 s)" in caplog.text, 30)
    wait_until(lambda: scrape_soon(url)("celery_dq_up") == 1, 30)


def test_the_next_server_of_a_list_is_read_when_one_dies(
    make_app: MakeApp, serve: Serve, redis_server: RedisServer, redis_url: str, broker_url: str
) -> None:
    with Proxy(redis_server.port) as first:
        policy = {"max_retries": 1, "interval_start": 0}
        url = serve(make_app(f"{first.url(redis_url)};{broker_url}", task_publish_retry_policy=policy))
        assert scrape(url)("celery_dq_up") == 1
    wait_until(lambda: scrape_soon(url)("celery_dq_up") == 0, 30)
    wait_until(lambda: scrape_soon(url)("celery_dq_up") == 1, 30)


def test_queues_are_served_while_the_elections_are_silent(
    make_app: MakeApp, serve: Serve, proxy: Proxy, redis_url: str
) -> None:
    proxy.black_hole.set()
    election = proxy.url(redis_url).removeprefix("dq-")
    app = make_app(dq_election=election, dq_singleton_queues=["push"], dq_metrics_timeout=TIMEOUT_S)
    send(app, "a")
    metrics = scrape_soon(serve(app))
    assert metrics("celery_dq_up") == 1
    assert metrics("celery_dq_elections_up") == 0
    assert metrics("celery_queue_length", queue_name="push") == 1


def test_concurrent_scrapes_share_one_reading(
    make_app: MakeApp, serve: Serve, proxy: Proxy, redis_url: str
) -> None:
    app = make_app(proxy.url(redis_url))
    url = serve(app)
    proxy.hold_answers_to, proxy.holds_left = b"SMEMBERS", 1
    found: list[Metrics] = []
    threads = [threading.Thread(target=lambda: found.append(scrape(url))) for _ in range(5)]
    for thread in threads:
        thread.start()
    wait_until(lambda: proxy.held == 1, 30)
    # Each request has a thread of the server.
    wait_until(lambda: sum("process_request" in each.name for each in threading.enumerate()) == 5, 30)
    proxy.release_answers.set()
    for thread in threads:
        thread.join(30)
    assert [metrics("celery_dq_up") for metrics in found] == [1] * 5
    assert len({metrics("celery_dq_scrape_duration_seconds") for metrics in found}) == 1


def test_a_client_that_sends_nothing_delays_no_other(make_app: MakeApp, serve: Serve) -> None:
    url = serve(make_app())
    parts: Any = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port)):
        assert scrape_soon(url)("celery_dq_up") == 1


class HangingReader:
    def __init__(self) -> None:
        self.begun, self.go_on = 0, threading.Event()

    def begin(self) -> BrokerState:
        self.begun += 1
        return BrokerState()

    def read(self, state: BrokerState) -> None:
        assert self.go_on.wait(30)
        state.up = True


def test_scrapes_of_a_broker_that_hangs_begin_one_reading() -> None:
    clock, reader = ManualClock(), HangingReader()
    reads: Any = reader
    shared = SharedState(reads, 0.0, clock)
    for _ in range(3):
        assert shared.get().up is None
        clock.advance(FRESH_S)
    assert reader.begun == 1
    reader.go_on.set()
    wait_until(lambda: shared.get().up and reader.begun == 2)


def test_a_scrape_for_which_no_thread_can_start_ends_no_server(make_app: MakeApp, serve: Serve) -> None:
    url = serve(make_app())
    with no_more_threads(), pytest.raises(OSError):
        scrape(url)
    assert scrape_soon(url)("celery_dq_up") == 1


def test_another_reading_follows_one_whose_thread_could_not_start() -> None:
    clock, reader = ManualClock(), HangingReader()
    reader.go_on.set()
    reads: Any = reader
    shared = SharedState(reads, SOON_S, clock)
    with no_more_threads():
        assert shared.get().up is None
    clock.advance(FRESH_S)
    assert shared.get().up
