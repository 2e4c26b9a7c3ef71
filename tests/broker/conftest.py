from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_dq.testing.servers import RedisServer
from tests.broker.counter import Counter
from tests.broker.proxy import Proxy


@pytest.fixture
def counter(redis_url: str) -> Iterator[Counter]:
    counter = Counter(redis_url)
    yield counter
    counter.close()


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    with Proxy(redis_server.port) as proxy:
        yield proxy
