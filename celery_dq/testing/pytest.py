"""Fixtures for pytest: an empty broker for each test, and a worker.

``pytest_plugins = ["celery_dq.testing.pytest"]`` in the topmost ``conftest.py`` enables them. Override
:func:`dq_app`, :func:`dq_settings` and :func:`dq_worker_options` to configure them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.app import app_or_default
from celery.contrib.testing.worker import start_worker

from celery_dq.testing.apps import use_broker
from celery_dq.testing.servers import RedisServer

__all__ = ["dq_app", "dq_broker", "dq_redis", "dq_settings", "dq_worker", "dq_worker_options"]


@pytest.fixture(scope="session")
def dq_redis() -> Iterator[RedisServer]:
    """Provide a Redis server, one for the session."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def dq_app() -> Any:
    """Return the app under test: the current app, unless this fixture is overridden."""
    return app_or_default()


@pytest.fixture
def dq_settings() -> dict[str, Any]:
    """Return additional settings of the app during a test; override this fixture."""
    return {}


@pytest.fixture
def dq_broker(
    dq_app: Any, dq_redis: RedisServer, dq_settings: dict[str, Any], tmp_path: Path
) -> Iterator[Any]:
    """Provide the app with an empty broker and an empty result backend during a test."""
    dq_redis.ask("FLUSHALL")
    settings = dict(dq_settings)
    if dq_app.conf.get("dq_buffer_folder"):
        settings.setdefault("dq_buffer_folder", str(tmp_path / "dq_buffer"))
    backend = settings.pop("result_backend", dq_redis.url(1))
    with use_broker(dq_app, dq_redis.url(scheme="dq-redis"), backend, **settings) as app:
        yield app


@pytest.fixture
def dq_worker_options() -> dict[str, Any]:
    """Return options of the worker, e.g. ``{"queues": "push", "pool": "threads"}``; override this fixture."""
    return {}


@pytest.fixture
def dq_worker(dq_broker: Any, dq_worker_options: dict[str, Any]) -> Iterator[Any]:
    """Provide a worker of the app, in a thread of the test process, on the broker of :func:`dq_broker`."""
    with start_worker(dq_broker, **{"perform_ping_check": False, **dq_worker_options}) as worker:
        yield worker
