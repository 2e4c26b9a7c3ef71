from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from celery_dq.dedup.local import LocalCoordinator
from celery_dq.dedup.machine import Coordinator
from celery_dq.keys import DedupKeys
from celery_dq.other_brokers.redis_coordinator import RedisCoordinator, load_scripts

SCRIPTS = load_scripts()


def redis_coordinator(client: Any, owner: str = "w1", lease: float = 30.0) -> RedisCoordinator:
    return RedisCoordinator(client, DedupKeys("online"), SCRIPTS, owner=owner, lease=lease)


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
