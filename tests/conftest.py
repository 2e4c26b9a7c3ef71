"""Servers for the tests: one Redis for a session, a database of its own for a test."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import pytest

from celery_dq.testing.servers import RedisServer


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One Redis server for the whole session; do not stop, pause or reconfigure it."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_databases() -> Iterator[int]:
    """The numbers of the databases, over and over; 0 stays free."""
    return cycle(range(1, 16))


@pytest.fixture
def redis_url(redis_server: RedisServer, redis_databases: Iterator[int]) -> Iterator[str]:
    """The URL of an empty database that no other test uses at the same time."""
    db = next(redis_databases)
    url = redis_server.url(db)
    redis_server.flush(db)
    yield url
    redis_server.flush(db)
