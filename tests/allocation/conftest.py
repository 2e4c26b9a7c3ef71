"""Workers that share the partitions of a queue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_dq.testing.servers import RedisServer
from tests.allocation.shared_queue import SharedQueue


@pytest.fixture
def shared_queue(redis_server: RedisServer, hosts: str) -> Iterator[SharedQueue]:
    """A queue of eight partitions that workers share through ZooKeeper."""
    for db in (1, 2, 3):
        redis_server.flush(db)
    shared_queue = SharedQueue(redis_server, hosts)
    yield shared_queue
    shared_queue.close()
