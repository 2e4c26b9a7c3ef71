"""Connections to a broker in a ZooKeeper folder that belongs to the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kombu import Connection

from celery_dq.wiring import register_transports
from celery_dq.zookeeper.session import Session
from tests.zookeeper_transport.kinds import Connect


@pytest.fixture(autouse=True)
def schemes() -> None:
    register_transports()


@pytest.fixture
def connect(hosts: str) -> Iterator[Connect]:
    """Return a function that opens a connection; all connections are closed after the test.

    Sessions last 15 seconds by default, so that none expires when the machine is stopped for a moment.
    """
    opened: list[Connection] = []

    def make(url: str = f"dq-zookeeper://{hosts}", **options: object) -> Connection:
        connection = Connection(url, transport_options={"session_timeout": 15, **options})
        opened.append(connection)
        return connection

    yield make
    for connection in opened:
        connection.close()


@pytest.fixture
def looker(hosts: str) -> Iterator[Session]:
    """An independent session for looking at nodes."""
    session = Session(hosts)
    yield session
    session.close()
