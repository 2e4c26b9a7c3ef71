from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from celery_dq.testing.servers import RedisServer
from tests.broker.kombu_client import KombuClient
from tests.broker.proxy import Proxy
from tests.broker.worker_app import OpenApp, WorkerApp


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
def open_app(redis_server: RedisServer) -> Iterator[OpenApp]:
    """Return a function that makes an app with these settings, whose broker may have another port."""
    for db in (1, 2, 3):
        redis_server.flush(db)
    with ExitStack() as stack:
        yield lambda **conf: stack.enter_context(closing(WorkerApp(redis_server, **conf)))


@pytest.fixture
def worker_app(open_app: OpenApp) -> WorkerApp:
    return open_app()


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    with Proxy(redis_server.port) as proxy:
        yield proxy
