"""The setting ``spread_above_per_s``: the rate of a tenant's quota decides its spread."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from celery_dq import TenantMoving
from celery_dq.app.api.quotas import spread_by_rate
from celery_dq.errors import ConfigurationError
from celery_dq.options import Quota, resolve
from tests.integration.partitioned_shop import A, B, opened
from tests.integration.shop import send
from tests.integration.test_spread_operations import claim_everywhere


@pytest.fixture
def rated(shop: Any) -> Any:
    """The shop, whose tenants get a partition for each 150 messages a second."""
    shop.conf.dq_queues = {"push": {"partitions": 4, "spread_above_per_s": 150}}
    return shop


def lives_in(app: Any, tenant: str) -> int:
    with opened(app) as found:
        return len(found.homes.partitions(tenant))


@pytest.mark.parametrize(
    ("quota", "spread"),
    [
        (Quota(), 1),
        (Quota(rate=150, burst=99), 1),
        (Quota(rate=150.5, burst=99), 2),
        (Quota(rate=9_000, burst=99), 8),
        (Quota(rate=9_000, burst=3.5), 3),
        (Quota(rate=9_000, burst=99, concurrency=2), 2),
        (Quota(rate=9_000), 1),
    ],
)
def test_the_rate_is_divided_by_the_threshold(quota: Quota, spread: int) -> None:
    assert spread_by_rate(quota, 150, 8) == spread


def test_the_spread_follows_the_rate_of_the_quota(rated: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    quotas = rated.dq.quotas
    send(rated, *[A] * 12)
    assert quotas.set("push", A, rate=400, burst=60).spread == lives_in(rated, A) == 3
    assert len(claim_everywhere(rated)) == 12
    assert rated.dq.audit(limit=1)[0].details == str(Quota(rate=400, burst=60, spread=3))
    assert quotas.set("push", A, weight=2).spread == 3
    (record,) = [each for each in caplog.records if getattr(each, "event", "") == "tenant_spread_by_rate"]
    assert record.getMessage() == (
        f"Tenant {A!r} of queue push gets 3 partitions instead of 1: its rate is 400/s, and "
        "dq_queues['push']['spread_above_per_s'] is 150."
    )
    with pytest.raises(TenantMoving):
        quotas.set("push", A, rate=8_000, burst=1, timeout=0)
    assert quotas.get("push", A) == Quota(rate=8_000, burst=1, weight=2)


def test_a_spread_that_a_user_names_stays(rated: Any) -> None:
    quotas = rated.dq.quotas
    assert quotas.set("push", A, rate=400, burst=12, spread=2).spread == 2
    assert quotas.set("push", A, rate=9_000).spread == lives_in(rated, A) == 2
    assert quotas.set("push", B, rate=400, burst=12, spread=1).spread == 1
    assert quotas.set("push", B, rate=900).spread == 1
    assert quotas.set("push", B, spread=4).spread == 4
    assert quotas.set("push", B, rate=300).spread == lives_in(rated, B) == 2


def test_tenants_of_a_default_are_not_spread(rated: Any) -> None:
    rated.dq.quotas.set_default("push", rate=900, burst=20)
    send(rated, *[A] * 3)
    assert lives_in(rated, A) == 1
    assert rated.dq.quotas.set("push", A, weight=2).spread == 4


def test_an_impossible_threshold_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"\['spread_above_per_s'\] = 0 is too small: give 1 or more"
    ):
        resolve({"dq_queues": {"push": {"spread_above_per_s": 0}}})
