"""One ZooKeeper for a session, a folder of its own for a test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from celery_dq.testing.zookeeper import ZooKeeperServer
from tests.leadership.booth import Booth, redis_booth, zookeeper_booth


@pytest.fixture(scope="session")
def zookeeper() -> Iterator[ZooKeeperServer]:
    """Do not stop or pause it."""
    with ZooKeeperServer(tick_ms=200) as server:
        yield server


@pytest.fixture
def hosts(zookeeper: ZooKeeperServer) -> str:
    """A host list with a chroot that no other test uses."""
    return f"{zookeeper.hosts}/t-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def own_zookeeper() -> Iterator[ZooKeeperServer]:
    """A server that the test may stop, pause and kill."""
    with ZooKeeperServer(tick_ms=200) as server:
        yield server


@pytest.fixture(params=[zookeeper_booth, redis_booth], ids=["zookeeper", "redis"])
def booth(request: pytest.FixtureRequest) -> Iterator[Booth]:
    made: Booth = request.param(request)
    yield made
    made.close()
