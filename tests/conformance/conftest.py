"""The servers and brokers that the conformance suite runs over."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator, Mapping
from itertools import count
from pathlib import Path
from tempfile import gettempdir

import pytest
from kombu import Connection

from celery_dq.testing.servers import RedisServer
from tests.brokers import BROKERS, CONFORMING, Broker
from tests.conformance.celery_app import CeleryApp
from tests.conformance.kombu_queue import KOMBU_DB, KombuQueue

#: The shared workers send events, because a test listens to them.
SHARED_ARGUMENTS = ("--without-mingle", "--without-gossip", "--without-heartbeat", "-E")

#: Brokers on which a part of the suite runs, unless the option of their name is given: modules or tests.
IN_PART: Mapping[str, tuple[str, ...]] = {
    "cluster": (
        "test_cold_shutdown_releases_running_tasks",
        "test_delayed_tasks_survive_a_shutdown",
        "test_messages_of_the_first_protocol",
        "test_publishing_from_threads",
        "test_shutdown_by_remote_control",
        "test_a_throttled_task_runs_again_later_and_no_retry_is_counted",
    ),
    "sqlite": (
        "test_cold_shutdown_releases_running_tasks",
        "test_connections",
        "test_delivery",
        "test_encoding",
        "test_no_message_ends_the_worker",
        "test_other_stores",
        "test_queues",
        "test_routing",
        "test_shutdown_by_remote_control",
        "test_a_throttled_task_runs_again_later_and_no_retry_is_counted",
    ),
    # It says whether a test describes Celery, too, which no change of this package can alter.
    "stock": ("test_connections", "test_delivery", "test_encoding", "test_queues", "test_routing"),
}

_serial = count()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server
        # A result that was never read notifies its backend at collection, so collect it while there is a
        # backend.
        gc.collect()


@pytest.fixture(scope="session")
def broker_port(broker: Broker, request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of the server that the broker under test runs on; a number of the run for one in files."""
    if broker.server == "file":
        yield os.getpid()
        for path in Path(gettempdir()).glob(f"dq-conformance-{os.getpid()}-*"):
            path.unlink()
    elif broker.server == "cluster":
        yield int(request.getfixturevalue("redis_cluster").nodes[0].port)
    else:
        server = request.getfixturevalue("zookeeper" if broker.server == "zookeeper" else "redis_server")
        yield int(server.port)


@pytest.fixture(scope="session", params=CONFORMING)
def broker(request: pytest.FixtureRequest) -> Broker:
    chosen = BROKERS[request.param]
    chosen.prepare()
    return chosen


@pytest.fixture
def broker_url(broker: Broker, broker_port: int) -> str:
    return broker.url(broker_port, KOMBU_DB)


@pytest.fixture
def connection(broker_url: str) -> Iterator[Connection]:
    with Connection(broker_url) as opened:
        yield opened


@pytest.fixture
def other_connection(broker_url: str) -> Iterator[Connection]:
    """A second connection, in the role of another process."""
    with Connection(broker_url) as opened:
        yield opened


@pytest.fixture
def queue_name() -> str:
    """A unique queue name."""
    return f"conformance-{next(_serial)}"


@pytest.fixture
def kombu_queue(connection: Connection, queue_name: str) -> KombuQueue:
    return KombuQueue(connection, queue_name)


@pytest.fixture
def celery_app(broker: Broker, redis_server: RedisServer, broker_port: int) -> Iterator[CeleryApp]:
    """An app on a new queue; the test starts the workers that it needs."""
    opened = CeleryApp(broker, redis_server, broker_port=broker_port)
    yield opened
    opened.close()


@pytest.fixture(scope="module", params=["solo", "threads", "prefork", "gevent", "eventlet"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def staffed_app(
    broker: Broker, redis_server: RedisServer, broker_port: int, pool: str
) -> Iterator[CeleryApp]:
    """An app with one running worker of the pool under test, shared by a module's tests."""
    opened = CeleryApp(broker, redis_server, broker_port=broker_port)
    # Two slots, so that another task can run beside a held one; solo always has one.
    with opened.worker(pool, name=f"{pool}-shared", arguments=SHARED_ARGUMENTS) as worker:
        opened.shared_worker = worker
        yield opened
    opened.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the pools that a broker's entry leaves out, and the rest of those in ``IN_PART``."""
    left = []
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        broker = BROKERS.get(params.get("broker", ""))
        part = None if broker is None or config.getoption(broker.name, False) else IN_PART.get(broker.name)
        names = {item.name.partition("[")[0], item.path.stem}
        if part is not None and names.isdisjoint(part):
            left.append(item)
            continue
        shared = "staffed_app" in getattr(item, "fixturenames", ())
        if shared and broker is not None and params.get("pool") in broker.left_out:
            left.append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """When a test on the shared worker fails, the end of the worker's log is part of the report."""
    report = yield
    staffed_app = getattr(item, "funcargs", {}).get("staffed_app")
    if report.when == "call" and report.failed and staffed_app is not None:
        report.sections.append(("log of the shared worker", staffed_app.shared_worker.log[-6000:]))
    return report
