"""Celery apps on a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

import celery_dq
from tests.dq_command import Run, run_dq
from tests.integration.partitioned_shop import COUNT


@pytest.fixture
def broker_url(redis_url: str) -> str:
    return redis_url.replace("redis://", "dq-redis://", 1)


@pytest.fixture
def shop(broker_url: str) -> Iterator[Any]:
    """The app of a producer: queue ``push``, and task ``notify``, whose tenant is its first argument."""
    with Celery("shop", broker=broker_url, set_as_current=False) as app:
        celery_dq.setup(app)
        app.conf.task_default_queue = "push"

        @app.task(shared=False, name="notify", tenant="{merchant}")
        def notify(merchant: Any, order: int = 0) -> None: ...

        @app.task(shared=False, name="invoice", tenant="{merchant}")
        def invoice(merchant: Any) -> None: ...

        yield app
        producers: Any = app.pool
        producers.force_close_all()


@pytest.fixture
def run(shop: Any) -> Run:
    """A function that runs ``celery dq …``, and returns its output."""
    return lambda *words, **options: run_dq(shop, *words, **options).output


@pytest.fixture
def wide(shop: Any) -> Any:
    """The shop, whose queue has four partitions."""
    shop.conf.dq_queues = {"push": {"partitions": COUNT}}
    return shop


@pytest.fixture
def queue(wide: Any) -> Any:
    return wide.dq.queues["push"]
