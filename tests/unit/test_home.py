"""The partition of a tenant: known values, balance, and few moves when partitions are added."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from celery_dq.transport.redis.store import home
from celery_dq.transport.redis.store.home import Homes, home_of, jump_hash

TENANTS = [f"tenant-{number}" for number in range(20_000)]

#: Messages that are stored now are found by these values, so a change of them loses tenants.
KNOWN = {
    "": (0, 0, 0, 0, 610),
    "a": (0, 0, 13, 46, 2164),
    "acme": (0, 0, 8, 52, 2859),
    "42": (0, 0, 14, 51, 3914),
    "租户": (0, 3, 5, 43, 2580),
}


@pytest.mark.parametrize(
    ("key", "count", "bucket"),
    [(1, 1, 0), (42, 57, 43), (0xDEAD10CC, 666, 361), (256, 1024, 520), (10863919174838991, 11, 6)],
)
def test_the_hash_is_the_one_of_other_libraries(key: int, count: int, bucket: int) -> None:
    assert jump_hash(key, count) == bucket


@pytest.mark.parametrize("tenant", KNOWN)
def test_a_tenant_stays_where_it_is(tenant: str) -> None:
    assert tuple(home_of(tenant, count) for count in (2, 4, 16, 64, 4096)) == KNOWN[tenant]
    assert home_of(tenant, 1) == 0


@pytest.mark.parametrize("count", [2, 3, 64])
def test_tenants_are_spread_evenly(count: int) -> None:
    tenants = Counter(home_of(tenant, count) for tenant in TENANTS)
    mean = len(TENANTS) / count
    # Five standard deviations of a random choice.
    assert set(tenants) == set(range(count))
    assert all(abs(each - mean) < 5 * mean**0.5 for each in tenants.values())


@given(st.text(max_size=30), st.integers(1, 4096), st.integers(1, 4096))
def test_a_tenant_moves_only_to_a_new_partition(tenant: str, one: int, other: int) -> None:
    fewer, more = sorted((one, other))
    before, after = home_of(tenant, fewer), home_of(tenant, more)
    assert 0 <= before < fewer
    assert after == before or fewer <= after < more


def test_growing_moves_the_share_of_the_new_partitions() -> None:
    moved = sum(home_of(tenant, 64) != home_of(tenant, 80) for tenant in TENANTS)
    assert moved / len(TENANTS) == pytest.approx(16 / 80, abs=0.02)


def test_the_remembered_homes_are_right_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "REMEMBERED_TENANTS", 10)
    homes = Homes(64)
    for tenant in TENANTS[:25] * 2:
        assert homes.of(tenant) == home_of(tenant, 64)
        assert len(homes._known) <= 10
