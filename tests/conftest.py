"""Servers for the tests: one of a kind for a session, a database or folder of its own for a test."""

from __future__ import annotations

import gc
import logging
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import pytest
from celery import _state
from hypothesis import HealthCheck, settings

from celery_dq.testing.redis_cluster import RedisCluster
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.zookeeper import ZooKeeperServer
from tests.log_watch import WATCH, unexpected
from tests.rabbitmq import RabbitMQServer

# A pause of the machine proves nothing about an example: neither that it takes too long nor
# that it is hard to find.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the tests that take too long for each run."""
    parser.addoption("--cluster", action="store_true", help="the whole conformance suite on a cluster")
    parser.addoption("--sqlite", action="store_true", help="the whole conformance suite on an SQLite file")
    parser.addoption("--stock", action="store_true", help="the whole conformance suite on Celery's transport")


def pytest_configure() -> None:
    """Set no deadline for examples: a pause of the machine is not a fault of the tested code."""
    now = settings()
    checks = (*now.suppress_health_check, HealthCheck.too_slow)
    settings.register_profile("patient", now, deadline=None, suppress_health_check=checks)
    settings.load_profile("patient")


#: Folders in which files of many tests take a minute, too: nearly all of their tests need workers.
SLOW_FOLDERS = ("conformance", "singleton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow files, so that a run ends with a short one; a file of few tests is often slow."""
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.parent.name not in SLOW_FOLDERS, tests[item.path]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the classes that may have two jobs. Nothing refuses them."""
    passed = terminalreporter.getreports("passed")
    large = sorted(
        {str(text) for report in passed for name, text in report.user_properties if name == "large class"}
    )
    if large:
        terminalreporter.section("large classes")
        terminalreporter.write_line("\n".join(large))


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One Redis server for the whole session; do not stop, pause or reconfigure it."""
    with RedisServer() as server:
        yield server
        # A result that is collected later unsubscribes; without a server Celery 5.5 tries that for minutes.
        gc.collect()


@pytest.fixture(scope="session")
def quiet_redis_server() -> Iterator[RedisServer]:
    """Another Redis, for tests that count its commands: no heartbeat of an earlier test calls there."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def quiet_redis_url(quiet_redis_server: RedisServer) -> str:
    """The URL of that server, which is empty."""
    quiet_redis_server.flush()
    return quiet_redis_server.url()


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    """One Redis Cluster for the whole session. A test that kills a node restores it."""
    with RedisCluster() as cluster:
        yield cluster
        gc.collect()


@pytest.fixture(scope="session")
def rabbitmq_server() -> Iterator[RabbitMQServer]:
    """One RabbitMQ server for the whole session; do not stop it. Name your own queues: they last."""
    with RabbitMQServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_databases() -> Iterator[int]:
    """The numbers of the databases, over and over; 0 stays free."""
    return cycle(range(1, 16))


@pytest.fixture
def redis_url(redis_server: RedisServer, redis_databases: Iterator[int]) -> Iterator[str]:
    """The URL of an empty database that no other test uses at the same time."""
    db = next(redis_databases)
    url = redis_server.url(db)
    redis_server.flush(db)
    yield url
    redis_server.flush(db)


@pytest.fixture(scope="session")
def zookeeper() -> Iterator[ZooKeeperServer]:
    """One ZooKeeper for the whole session; do not stop or pause it."""
    with ZooKeeperServer(tick_ms=200) as server:
        yield server


@pytest.fixture
def hosts(zookeeper: ZooKeeperServer) -> str:
    """The host list of a ZooKeeper, with a chroot that no other test uses."""
    return f"{zookeeper.hosts}/t-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def own_zookeeper() -> Iterator[ZooKeeperServer]:
    """A ZooKeeper that the test may stop, pause and kill."""
    with ZooKeeperServer(tick_ms=200) as server:
        yield server


@contextmanager
def restored_process() -> Iterator[None]:
    """Restore the state that a Celery worker changes, for tests that run one in this process.

    A worker forbids ``result.get()`` and sets up the root logger: its level hides warnings from ``caplog``.
    A shared task is added to all later apps.
    """
    state: Any = _state
    root = logging.getLogger()
    level, handlers, blocks = root.level, root.handlers[:], state.task_join_will_block()
    shared = state._on_app_finalizers.copy()
    yield
    state._on_app_finalizers = shared
    state._set_task_join_will_block(blocks)
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture(autouse=True, scope="module")
def restored_process_of_module() -> Iterator[None]:
    """Restore the process after a worker that serves all tests of a file."""
    with restored_process():
        yield


@pytest.fixture(autouse=True)
def process_state() -> Iterator[None]:
    """Restore the process after each test."""
    with restored_process():
        yield


@pytest.fixture(autouse=True)
def logged_errors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test whose processes logged an error of the package that the test does not name."""
    logger = logging.getLogger("celery_dq")
    logger.addHandler(WATCH)
    yield
    logger.removeHandler(WATCH)
    expected = [str(text) for mark in request.node.iter_markers("logged_error") for text in mark.args]
    found = unexpected(WATCH.collect(), expected)
    assert not found, "logged, and named by no mark `logged_error`:\n" + "\n".join(found)
