"""Who hears of an eviction where no task says anything of dedup, and only calls do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from celery_dq.dedup.machine import Verdict
from celery_dq.dedup.rule import rule_of
from celery_dq.dedup.signals import claim_lost
from celery_dq.testing.waiting import wait_until
from tests.dedup.worker import Shop


@pytest.fixture
def plain_shop(redis_url: str) -> Iterator[Shop]:
    """Its one task that waits for its door says nothing of dedup."""
    shop = Shop(redis_url.replace("redis://", "dq-redis://"), redis_url, dq_lease=3)
    for name in [name for name, task in shop.app.tasks.items() if rule_of(task) is not None]:
        shop.app.tasks.pop(name)

    @shop.app.task(shared=False, name="plain", bind=True)
    def plain(task: Any, sku: Any, version: int = 0) -> Any:
        return shop.work(task, sku, version)

    yield shop
    shop.app.pool.force_close_all()
    shop.app.close()


def test_a_receiver_hears_of_a_call_that_had_a_key_of_its_own(plain_shop: Shop) -> None:
    shop, lost = plain_shop, []

    def hear(key: str, task_id: str, **_: Any) -> None:
        lost.append((key, task_id))

    claim_lost.connect(hear)
    plain = shop.task("plain")
    with shop.working(), redis.Redis.from_url(shop.app.conf.result_backend) as client:
        wait_until(lambda: client.pubsub_channels("*evicted*"), 30, what="an ear")
        head = plain.apply_async((1,), {"version": 1}, dedup={"key": "{sku}", "timeout": 0.2})
        wait_until(lambda: len(shop.runs) == 1, 30)
        tail = plain.apply_async((1,), {"version": 2}, dedup={"key": "{sku}"})
        assert tail.verdict is Verdict.BLOCK
        wait_until(lambda: lost == [("plain(sku=1)", head.id)], 30, what=lambda: str(lost))
        shop.open(1, 2)
        assert tail.get(timeout=30) == [1, 2]
