"""A Django project with an outbox, on each kind of database."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.databases import MariaDBServer, PostgreSQLServer
from tests.outbox.outbox_shop import OutboxShop

MakeShop = Callable[..., OutboxShop]


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQLServer]:
    """One PostgreSQL for the whole session; do not stop it."""
    with PostgreSQLServer() as server:
        yield server


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDBServer]:
    """One MariaDB for the whole session; do not stop it."""
    with MariaDBServer() as server:
        yield server


@pytest.fixture
def make_shop(redis_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MakeShop]:
    """A function that makes a project whose databases are of a kind, and empty."""
    made: list[OutboxShop] = []

    def make_shop(kind: str, *aliases: str) -> OutboxShop:
        databases: dict[str, Any] = {}
        for alias in aliases or ("default",):
            name = f"shop_{uuid.uuid4().hex[:8]}"
            if kind == "sqlite":
                databases[alias] = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / name)}
            else:
                server = request.getfixturevalue(kind)
                server.make_database(name)
                databases[alias] = server.settings(name)
        broker_url = redis_url.replace("redis://", "dq-redis://", 1)
        made.append(OutboxShop.made(databases, broker_url, tmp_path))
        return made[-1]

    yield make_shop
    for shop in made:
        shop.close()


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def shop(make_shop: MakeShop, request: pytest.FixtureRequest) -> OutboxShop:
    """The project on each kind of database."""
    return make_shop(request.param)


@pytest.fixture
def sqlite_shop(make_shop: MakeShop) -> OutboxShop:
    """The project on SQLite, for tests in which the kind of the database does not matter."""
    return make_shop("sqlite")


@pytest.fixture
def postgresql_shop(make_shop: MakeShop) -> OutboxShop:
    """The project on PostgreSQL, for tests with several processes."""
    return make_shop("postgresql")
