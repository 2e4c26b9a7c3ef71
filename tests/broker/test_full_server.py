"""A worker that starts while the memory of Redis is full."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from celery_dq.testing.servers import RedisServer
from tests.broker.worker_app import WorkerApp


@pytest.fixture(scope="module")
def full_server() -> Iterator[RedisServer]:
    with RedisServer(config={"maxmemory-policy": "noeviction"}) as server:
        yield server


@pytest.mark.parametrize("arguments", [(), ("--without-mingle", "--without-gossip", "--without-heartbeat")])
def test_a_worker_that_starts_while_redis_is_full_empties_the_queue(
    redis_server: RedisServer, full_server: RedisServer, arguments: tuple[str, ...]
) -> None:
    redis_server.flush(3)
    worker_app = WorkerApp(redis_server, full_server.port, dq_default_quota={"concurrency": 5})
    full = redis.Redis(port=full_server.port)
    full.config_set("maxmemory", 0)
    for n in range(5):
        worker_app.send("note", n)
    full.config_set("maxmemory", 1)
    try:
        with worker_app.worker("threads", 1, arguments=arguments) as worker:
            assert sorted(worker_app.ran(5)) == [*"01234"]
            assert "The memory of Redis is full" in worker.log
            worker_app.settled()
    finally:
        full.config_set("maxmemory", 0)
        full.close()
        worker_app.close()
