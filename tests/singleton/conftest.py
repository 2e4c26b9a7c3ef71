from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.zookeeper import ZooKeeperServer
from tests.singleton.office import Bank


@pytest.fixture(scope="session")
def book_server() -> Iterator[RedisServer]:
    """Where the judge keeps his book."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def numbers() -> Iterator[int]:
    """Databases of the broker's server, over and over."""
    return cycle(range(1, 16))


@pytest.fixture(params=["zookeeper", "redis"])
def election(request: pytest.FixtureRequest) -> str:
    """The setting ``dq_election``."""
    if request.param == "redis":
        return ""
    server: ZooKeeperServer = request.getfixturevalue("zookeeper")
    return f"zookeeper://{server.hosts}/t-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def open_bank(
    redis_server: RedisServer, book_server: RedisServer, numbers: Iterator[int]
) -> Iterator[Callable[..., Bank]]:
    """Make a bank with settings of its own."""
    opened: list[Bank] = []

    def open_one(**options: Any) -> Bank:
        db = next(numbers)
        redis_server.flush(db)
        opened.append(Bank(redis_server, book_server, db, **options))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


@pytest.fixture
def bank(open_bank: Callable[..., Bank], election: str) -> Bank:
    return open_bank(election=election)


@pytest.fixture
def till(open_bank: Callable[..., Bank]) -> Bank:
    """A bank whose broker holds the election: for what does not depend on who does."""
    return open_bank()
