"""Calls with a dedup key that go through the producer's buffer: their verdict comes after them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_dq.dedup import Dedup
from celery_dq.errors import ConfigurationError
from celery_dq.testing.waiting import wait_until
from tests.dedup.worker import Shop


@pytest.fixture(params=["dq-redis", "redis"])
def shop(request: pytest.FixtureRequest, redis_url: str, tmp_path: Path) -> Iterator[Shop]:
    url = redis_url.replace("redis:", f"{request.param}:")
    shop = Shop(url, redis_url, dq_lease=10, dq_buffer_folder=str(tmp_path))
    yield shop
    shop.app.dq.buffer.close()
    shop.close()


def later(shop: Shop, version: int, **options: Any) -> Any:
    return shop.task("refresh").apply_async((1, version), dedup={"verdict": "later"}, **options)


def test_duplicates_in_the_buffer_end_with_the_result_that_covers_them(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "celery_dq")
    with shop.app.dq.buffer.buffered():
        results = [later(shop, version) for version in range(4)]
    assert [getattr(result, "verdict", None) for result in results] == [None] * 4
    assert len({result.id for result in results}) == 4
    assert shop.app.dq.buffer.flush(timeout=30) == 0
    with shop.working():
        wait_until(lambda: shop.runs, 40)
        if not shop.app.conf.broker_url.startswith("dq"):
            # The worker gives the verdicts when it receives the calls.
            wait_until(lambda: caplog.text.count("was declined") == 2, 40, what=lambda: caplog.text)
        shop.open(1, 4)
        values = [result.get(timeout=40) for result in results]
    assert values[0] == [1, 0]
    assert [sku for sku, _ in values] == [1] * 4
    assert len(shop.runs) < 4
    assert shop.overlaps == []


def test_a_verdict_is_given_now_unless_it_may_come_later(shop: Shop) -> None:
    if shop.app.conf.broker_url.startswith("dq"):
        with shop.app.dq.buffer.buffered():
            assert shop.task("refresh").delay(1).verdict == "accept"
            assert not hasattr(later(shop, 1), "verdict")


def test_a_retry_does_not_wait_in_the_buffer(shop: Shop) -> None:
    failing, task_id = shop.task("failing"), uuid.uuid4().hex
    with shop.app.dq.buffer.buffered(), shop.working():
        result = failing.apply_async((1,), task_id=task_id, dedup={"verdict": "later"})
        shop.open(1, 3)
        assert result.get(timeout=40) == "done"
    assert [run for run, _ in shop.runs] == [task_id] * 3


def test_no_call_can_be_reported_later_by_an_exception() -> None:
    with pytest.raises(ConfigurationError, match="has returned before its verdict"):
        Dedup(on_duplicate="raise", verdict="later")
    with pytest.raises(ConfigurationError, match="neither 'now' nor 'later'"):
        Dedup(verdict="soon")  # type: ignore[arg-type]
