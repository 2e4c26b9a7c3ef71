from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_dq.testing.servers import RedisServer
from tests.broker.counter import Counter
from tests.broker.proxy import Proxy
from tests.broker.yard import Yard


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A Redis that the test may stop and start again; it forgets nothing."""
    with RedisServer(appendonly=True) as server:
        yield server


@pytest.fixture
def counter(redis_url: str) -> Iterator[Counter]:
    counter = Counter(redis_url)
    yield counter
    counter.close()


@pytest.fixture
def yard(redis_server: RedisServer) -> Iterator[Yard]:
    for db in (1, 2, 3):
        redis_server.flush(db)
    yard = Yard(redis_server)
    yield yard
    yard.close()


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    with Proxy(redis_server.port) as proxy:
        yield proxy
