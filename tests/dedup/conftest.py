from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from celery_dq.dedup.local import LocalCoordinator
from celery_dq.dedup.machine import Coordinator, Verdict
from celery_dq.dedup.signals import dedup_lock_lost, verdict_given
from celery_dq.keys import DedupKeys
from celery_dq.other_brokers.redis_coordinator import RedisCoordinator, load_scripts
from celery_dq.testing.servers import RedisServer
from tests.dedup.dedup_workers import DedupWorkers

SCRIPTS = load_scripts()


def redis_coordinator(client: Any, owner: str = "w1", lease: float = 30.0) -> RedisCoordinator:
    return RedisCoordinator(client, DedupKeys("online"), SCRIPTS, owner=owner, lease=lease)


@pytest.fixture
def dedup_workers(
    request: pytest.FixtureRequest, redis_url: str, redis_server: RedisServer
) -> Iterator[DedupWorkers]:
    """Workers on the tenant broker, or on one of another scheme."""
    redis_server.flush(0)
    url = redis_url.replace("redis:", f"{getattr(request, 'param', 'dq-redis')}:")
    workers = DedupWorkers(url, redis_url, redis_server.url(0))
    yield workers
    workers.close()
    redis_server.flush(0)


@pytest.fixture
def verdicts() -> Iterator[list[Verdict]]:
    """The verdicts that this process gives."""
    received: list[Verdict] = []

    def receive(verdict: Verdict, **_: Any) -> None:
        received.append(verdict)

    verdict_given.connect(receive)
    yield received
    verdict_given.disconnect(receive)


@pytest.fixture
def lost() -> Iterator[list[tuple[str, str, int]]]:
    """Key, task id and token of each dedup lock that is lost in this process."""
    received: list[tuple[str, str, int]] = []

    def receive(key: str, task_id: str, token: int, **_: Any) -> None:
        received.append((key, task_id, token))

    dedup_lock_lost.connect(receive)
    yield received
    dedup_lock_lost.disconnect(receive)


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url, socket_timeout=None) as client:
        yield client


@pytest.fixture(params=["local", "redis"])
def make(request: pytest.FixtureRequest) -> Callable[[], Coordinator]:
    """A function that makes empty coordinators of one kind."""
    if request.param == "local":
        return LocalCoordinator
    client = request.getfixturevalue("client")

    def made() -> Coordinator:
        client.flushdb()
        return redis_coordinator(client)

    return made


@pytest.fixture
def coordinator(make: Callable[[], Coordinator]) -> Coordinator:
    return make()
