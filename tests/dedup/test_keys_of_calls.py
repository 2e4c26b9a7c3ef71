"""Dedup keys of single calls, where no task has a dedup rule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from celery_dq.dedup.machine import Verdict
from celery_dq.dedup.rule import rule_of
from celery_dq.dedup.signals import dedup_lock_lost
from celery_dq.testing.waiting import wait_until
from tests.dedup.worker import Shop


@contextmanager
def plain_shop(broker_url: str, backend_url: str) -> Iterator[Shop]:
    """An app whose task, which waits at its barrier, has no dedup rule."""
    shop = Shop(broker_url, backend_url, dq_lease=10)
    for name in [name for name, task in shop.app.tasks.items() if rule_of(task) is not None]:
        shop.app.tasks.pop(name)

    def plain(task: Any, sku: Any, version: int = 0) -> Any:
        return shop.work(task, sku, version)

    shop.app.task(shared=False, name="plain", bind=True)(plain)
    yield shop
    shop.app.pool.force_close_all()
    shop.app.close()


@pytest.mark.parametrize("scheme", ["dq-redis", "redis"])
def test_they_exclude_each_other(redis_url: str, scheme: str) -> None:
    with plain_shop(redis_url.replace("redis://", f"{scheme}://"), redis_url) as shop, shop.working():
        plain = shop.task("plain")
        results = [plain.apply_async((1,), {"version": 1}, dedup={"key": "{sku}"})]
        wait_until(lambda: len(shop.runs) == 1, 30)
        results += [plain.apply_async((1,), {"version": n}, dedup={"key": "{sku}"}) for n in (2, 3)]
        other = plain.apply_async((2,))  # is received behind them
        wait_until(lambda: len(shop.runs) == 2, 30)
        shop.open(2)
        assert other.get(timeout=30) == [2, 0]
        shop.open(1, 3)
        assert [each.get(timeout=30) for each in results] == [[1, 1], [1, 2], [1, 2]]
        assert shop.overlaps == []


def test_a_receiver_learns_of_an_eviction(redis_url: str) -> None:
    lost: list[tuple[str, str]] = []

    def receive(key: str, task_id: str, **_: Any) -> None:
        lost.append((key, task_id))

    dedup_lock_lost.connect(receive)
    with (
        plain_shop(redis_url.replace("redis://", "dq-redis://"), redis_url) as shop,
        shop.working(),
        redis.Redis.from_url(redis_url) as client,
    ):
        plain = shop.task("plain")
        wait_until(lambda: client.pubsub_channels("*evicted*"), 30, what="an ear")
        head = plain.apply_async((1,), {"version": 1}, dedup={"key": "{sku}", "timeout": 0.2})
        wait_until(lambda: len(shop.runs) == 1, 30)
        tail = plain.apply_async((1,), {"version": 2}, dedup={"key": "{sku}"})
        assert tail.verdict is Verdict.BLOCK
        wait_until(lambda: lost == [("plain(sku=1)", head.id)], 30, what=lambda: str(lost))
        shop.open(1, 2)
        assert tail.get(timeout=30) == [1, 2]
