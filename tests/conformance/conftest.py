"""The servers and brokers that the conformance suite runs over."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from kombu import Connection

from celery_dq.testing.servers import RedisServer
from tests.brokers import ACTIVE, BROKERS, Broker
from tests.conformance.mailroom import KOMBU_DB, Mailroom

_serial = count()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session", params=ACTIVE)
def broker(request: pytest.FixtureRequest) -> Broker:
    chosen = BROKERS[request.param]
    chosen.prepare()
    return chosen


@pytest.fixture
def broker_url(broker: Broker, redis_server: RedisServer) -> str:
    return broker.url(redis_server.port, KOMBU_DB)


@pytest.fixture
def connection(broker_url: str) -> Iterator[Connection]:
    with Connection(broker_url) as opened:
        yield opened


@pytest.fixture
def other_connection(broker_url: str) -> Iterator[Connection]:
    """A second connection, standing for another process."""
    with Connection(broker_url) as opened:
        yield opened


@pytest.fixture
def queue_name() -> str:
    """A queue name that no other test uses."""
    return f"conformance-{next(_serial)}"


@pytest.fixture
def mailroom(connection: Connection, queue_name: str) -> Mailroom:
    return Mailroom(connection, queue_name)
