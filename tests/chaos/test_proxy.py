"""The proxy forwards, swallows, and gives up what it kept back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.chaos.proxy import Proxy


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    standing = Proxy(server.port).start()
    yield standing
    standing.stop()


def test_it_forwards(proxy: Proxy) -> None:
    with redis.Redis(port=proxy.port) as client:
        assert client.ping()


def test_a_black_hole_keeps_connections_open_and_delivers_late(proxy: Proxy, server: RedisServer) -> None:
    with (
        redis.Redis(port=proxy.port, socket_timeout=0.3, retry=Retry(NoBackoff(), 0)) as client,
        redis.Redis(port=server.port) as direct,
    ):
        client.ping()
        proxy.black_hole()
        with pytest.raises(redis.TimeoutError):
            client.set("late", 1)
        assert direct.get("late") is None
        proxy.restore()
        wait_until(lambda: direct.get("late") == b"1", 5)


def test_severing_closes_connections(proxy: Proxy) -> None:
    make: Any = redis.Connection
    connection = make(port=proxy.port, socket_timeout=5)
    connection.connect()
    proxy.sever()
    with pytest.raises(redis.ConnectionError):
        connection.read_response()
    connection.disconnect()


def test_stopping_twice_is_harmless(server: RedisServer) -> None:
    standing = Proxy(server.port).start()
    standing.stop()
    standing.stop()
