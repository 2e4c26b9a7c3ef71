"""The RabbitMQ server of the tests."""

from __future__ import annotations

import socket

from kombu import Connection

from celery_dq.testing.rabbitmq import RabbitMQServer
from tests.unit.test_servers import running


def test_it_keeps_its_durable_queues_over_a_kill_and_leaves_nothing_behind() -> None:
    with RabbitMQServer() as server:
        # Once it is confirmed, it is on disk.
        with Connection(server.url(), transport_options={"confirm_publish": True}) as connection:
            connection.SimpleQueue("kept").put({"kept": 1})
        port, first, folder = server.port, server.pid, server.folder
        server.kill()
        assert not running(first)
        server.restart()
        assert server.port == port
        with Connection(server.url()) as connection:
            assert connection.SimpleQueue("kept").get(timeout=10).payload == {"kept": 1}
        last = server.pid
    assert not running(last)
    assert not folder.exists()
    with socket.socket() as probe:
        # Nobody listens there any more.
        assert probe.connect_ex(("127.0.0.1", port)) != 0
