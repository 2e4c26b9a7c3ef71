"""The RabbitMQ server of the tests."""

from __future__ import annotations

import socket

from kombu import Connection

from tests.rabbitmq import RabbitMQServer
from tests.unit.test_servers import running


def test_a_server_of_ones_own_leaves_nothing_behind() -> None:
    with RabbitMQServer() as server:
        with Connection(server.url()) as connection:
            connection.SimpleQueue("mine").put({"kept": 1})
            assert connection.SimpleQueue("mine").get(timeout=30).payload == {"kept": 1}
        port, pid, folder = server.port, server.pid, server.folder
        server.kill()
        assert not running(pid)
    assert not folder.exists()
    with socket.socket() as probe:
        # No process listens there any more.
        assert probe.connect_ex(("127.0.0.1", port)) != 0
