"""The proxy forwards bytes, holds them back, and forwards them later."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
import redis

from celery_dq.testing.servers import RedisServer
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


def connect(proxy: Proxy) -> Any:
    """Provide a connection through the proxy that has been used once."""
    make: Any = redis.Connection
    connection = make(port=proxy.port, socket_timeout=30)
    connection.send_command("PING")
    assert connection.read_response() == b"PONG"
    return connection


def test_a_black_hole_keeps_connections_open_and_delivers_late(proxy: Proxy, server: RedisServer) -> None:
    connection = connect(proxy)
    with redis.Redis(port=server.port) as direct:
        proxy.black_hole()
        connection.send_command("SET", "late", 1)
        assert not connection.can_read(timeout=0.3)
        assert direct.get("late") is None
        proxy.restore()
        assert connection.read_response() == b"OK"
        assert direct.get("late") == b"1"
    connection.disconnect()


def test_to_stop_it_is_no_error(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    standing = Proxy(server.port).start()
    with closing(socket.create_connection(("127.0.0.1", standing.port), timeout=30)) as served:
        served.sendall(b"PING\r\n")
        assert served.recv(100) == b"+PONG\r\n"
        standing.black_hole()
        with closing(socket.create_connection(("127.0.0.1", standing.port), timeout=30)) as kept_waiting:
            standing.stop()
            # A connected client gets an end of file or a reset.
            for end in (served, kept_waiting):
                with suppress(ConnectionError):
                    assert end.recv(100) == b""
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
