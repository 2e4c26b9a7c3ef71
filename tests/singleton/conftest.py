from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.zookeeper import ZooKeeperServer
from tests.singleton.posting_workers import PostingWorkers


@pytest.fixture(scope="session")
def book_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def numbers() -> Iterator[int]:
    """The databases of the broker's server, in rotation."""
    return cycle(range(1, 16))


@pytest.fixture(params=["zookeeper", "redis"])
def election(request: pytest.FixtureRequest) -> str:
    if request.param == "redis":
        return ""
    server: ZooKeeperServer = request.getfixturevalue("zookeeper")
    return f"zookeeper://{server.hosts}/t-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def open_posting(
    redis_server: RedisServer, book_server: RedisServer, numbers: Iterator[int]
) -> Iterator[Callable[..., PostingWorkers]]:
    """Return a function that makes a posting app with the given settings."""
    opened: list[PostingWorkers] = []

    def open_one(**options: Any) -> PostingWorkers:
        db = next(numbers)
        redis_server.flush(db)
        opened.append(PostingWorkers(redis_server, book_server, db, **options))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


@pytest.fixture
def open_plain(
    open_posting: Callable[..., PostingWorkers], redis_server: RedisServer
) -> Callable[..., PostingWorkers]:
    """Return a function that makes a posting app on one of Celery's own transports, by default on Redis.

    Another database of the same server holds the election. It has keys of its own, because a killed worker of
    another test may still lead in a shared one.
    """
    shared = {"broker": "stock", "election": redis_server.url(0), "dq_environment": "sandbox"}
    return lambda **options: open_posting(**shared, dq_key_prefix=f"t{uuid.uuid4().hex[:8]}", **options)


@pytest.fixture
def plain(open_plain: Callable[..., PostingWorkers]) -> PostingWorkers:
    return open_plain()


@pytest.fixture
def posting(open_posting: Callable[..., PostingWorkers], election: str) -> PostingWorkers:
    return open_posting(election=election)


@pytest.fixture
def redis_posting(open_posting: Callable[..., PostingWorkers]) -> PostingWorkers:
    """A posting app whose broker holds the election, for tests that do not depend on the kind of election."""
    return open_posting()
