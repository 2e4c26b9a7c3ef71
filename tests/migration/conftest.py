"""Two apps with the same tasks: one on kombu's Redis transport, one on the tenant broker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

import celery_dq
from celery_dq.cli import dq
from celery_dq.testing.servers import RedisServer

Migrate = Callable[..., Any]


def add_tasks(app: Celery) -> None:
    options: Any = {"tenant": "{merchant}"} if hasattr(app, "dq") else {}

    @app.task(shared=False, name="notify", **options)
    def notify(merchant: Any, order: int = 0) -> None: ...


def close_connections(app: Any) -> None:
    """Close the connections of a pool that all apps with its URL share, and fill it again."""
    app.pool.force_close_all(close_pool=False)
    app.pool.setup()


@pytest.fixture
def stock(redis_url: str) -> Iterator[Any]:
    """The app of a stock producer."""
    with Celery("shop", broker=redis_url, set_as_current=False) as app:
        app.conf.task_default_queue = "push"
        add_tasks(app)
        yield app
        close_connections(app)


@pytest.fixture
def shop(redis_server: RedisServer, redis_databases: Iterator[int]) -> Iterator[Any]:
    """The app on the tenant broker, in another database."""
    db = next(redis_databases)
    redis_server.flush(db)
    with Celery("shop", broker=redis_server.url(db, scheme="dq-redis"), set_as_current=False) as app:
        celery_dq.setup(app)
        app.conf.task_default_queue = "push"
        add_tasks(app)
        yield app
        close_connections(app)
    redis_server.flush(db)


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    """A client of the stock broker's database."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


def migration_of(app: Any, *urls: str) -> Migrate:
    """Return a function that runs ``celery dq migrate --json`` of these brokers, and returns its report."""

    def migrate(*words: str, status: int = 0) -> Any:
        context = CLIContext(app=app, no_color=True, workdir=None)
        result = CliRunner().invoke(dq, ["migrate", *urls, "--yes", "--json", *words], obj=context)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        assert result.exit_code == status, result.output
        return json.loads(result.stdout) if result.stdout.startswith("{") else result.output

    return migrate


@pytest.fixture
def migrate(shop: Any, redis_url: str) -> Migrate:
    """A migration from the stock broker."""
    return migration_of(shop, redis_url)
