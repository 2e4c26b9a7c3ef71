from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_dq.testing.servers import RedisServer
from tests.broker.kombu_client import KombuClient
from tests.broker.proxy import Proxy
from tests.broker.worker_app import WorkerApp


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A Redis with an append-only file, which the test may stop and start again."""
    with RedisServer(appendonly=True) as server:
        yield server


@pytest.fixture
def kombu_client(redis_url: str) -> Iterator[KombuClient]:
    kombu_client = KombuClient(redis_url)
    yield kombu_client
    kombu_client.close()


@pytest.fixture
def worker_app(redis_server: RedisServer) -> Iterator[WorkerApp]:
    for db in (1, 2, 3):
        redis_server.flush(db)
    worker_app = WorkerApp(redis_server)
    yield worker_app
    worker_app.close()


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    with Proxy(redis_server.port) as proxy:
        yield proxy
