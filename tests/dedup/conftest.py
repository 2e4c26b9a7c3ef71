from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from celery_dq.dedup.coordinator import Coordinator
from celery_dq.dedup.local import LocalCoordinator
from celery_dq.dedup.redis import RedisCoordinator, load_scripts
from celery_dq.keys import ClaimKeys

SCRIPTS = load_scripts()


def redis_coordinator(client: Any, owner: str = "w1", lease: float = 30.0) -> RedisCoordinator:
    return RedisCoordinator(client, ClaimKeys("online"), SCRIPTS, owner=owner, lease=lease)


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url, socket_timeout=None) as client:
        yield client


@pytest.fixture(params=["local", "redis"])
def make(request: pytest.FixtureRequest) -> Callable[[], Coordinator]:
    """Makes coordinators of one kind, each empty."""
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
