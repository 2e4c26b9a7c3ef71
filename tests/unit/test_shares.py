"""The shares of a spread tenant: their partitions, their messages, and their parts of the quota."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from celery_dq.errors import ConfigurationError, InvalidQuota
from celery_dq.options import Quota
from celery_dq.options.quota import WHEN_FULL
from celery_dq.transport.redis.store.home import home_of, share_of
from celery_dq.transport.redis.store.partition_map import PartitionMap

tenants = st.text(max_size=20)


@given(tenants, st.integers(1, 80), st.integers(1, 80), st.integers(1, 80))
def test_a_higher_spread_adds_shares_in_other_partitions(tenant: str, a: int, b: int, c: int) -> None:
    fewer, more, count = sorted((a, b, c))
    small = PartitionMap(count).begin_spread(tenant, fewer).end()
    change = small.begin_spread(tenant, more)
    shares = change.partitions(tenant)
    assert (len(shares), len(set(shares))) == (more, more)
    assert set(shares) <= set(range(count))
    assert shares[:fewer] == change.old_partitions(tenant) == small.partitions(tenant)
    assert shares[0] == home_of(tenant, count)
    back = change.end().begin_spread(tenant, fewer)
    assert back.partitions(tenant) == shares[:fewer]
    assert change.end().begin_spread(tenant, 1).partitions(tenant) == (home_of(tenant, count),)


@given(tenants, st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1), st.data())
def test_a_share_moves_only_from_a_partition_that_goes_to_one_without(
    tenant: str, count: int, counts: list[int], data: st.DataObject
) -> None:
    spread = data.draw(st.integers(1, min(count, *counts)))
    homes = PartitionMap(count).begin_spread(tenant, spread).end()
    for each in counts:
        change = homes.begin(each)
        homes = change.end()
        for old, new in zip(change.old_partitions(tenant), change.partitions(tenant), strict=True):
            if spread > 1 and old != new:
                assert old >= each > new
                assert new not in change.old_partitions(tenant)
        assert len(set(homes.partitions(tenant))) == spread
        assert max(homes.partitions(tenant)) < each


@given(st.text(max_size=20), st.integers(1, 64), st.integers(1, 64))
def test_a_key_moves_to_a_new_share_only(key: str, one: int, other: int) -> None:
    fewer, more = sorted((one, other))
    assert share_of(key, more) == share_of(key, fewer) or fewer <= share_of(key, more) < more


def test_messages_are_divided_evenly() -> None:
    found = Counter(share_of(f"task-{number}", 8) for number in range(8_000))
    assert all(abs(each - 1_000) < 5 * 1_000**0.5 for each in found.values())


quotas = st.builds(
    Quota,
    rate=st.none() | st.floats(0.01, 100_000),
    burst=st.floats(64, 1_000_000),
    weight=st.floats(0.001, 1_000),
    concurrency=st.none() | st.integers(64, 1_000_000),
    max_waiting=st.none() | st.integers(64, 1_000_000_000),
    when_full=st.sampled_from(WHEN_FULL),
    spread=st.integers(2, 64),
)


def share(quota: Quota, number: int, shares: int) -> Quota:
    """One share as a quota of its own: the scripts read as many bytes as a quota without shares has."""
    return Quota.unpack(quota.pack(number, shares)[: len(Quota().pack())])


@given(quotas)
def test_the_shares_of_a_quota_make_the_whole(quota: Quota) -> None:
    packed = [quota.pack(number) for number in range(quota.spread)]
    parts = [share(quota, number, quota.spread) for number in range(quota.spread)]
    for name in ("concurrency", "max_waiting"):
        whole, given_out = getattr(quota, name), [getattr(each, name) for each in parts]
        if whole is None:
            assert set(given_out) == {None}
        else:
            assert sum(given_out) == whole
            assert max(given_out) - min(given_out) <= 1
    assert {each.when_full for each in parts} == {quota.when_full}
    assert sum(each.burst for each in parts) == pytest.approx(quota.burst)
    if quota.rate is not None:
        assert {each.interval_us for each in parts} == {quota.spread * quota.interval_us}
    assert {each.weight for each in parts} == {quota.weight}
    assert {Quota.unpack(each).pack() for each in packed} == {packed[0]}


def test_a_share_allows_one_message_while_the_spread_of_a_small_quota_changes() -> None:
    quota = Quota(rate=8, burst=1, concurrency=2, max_waiting=3)
    parts = [share(quota, number, 4) for number in range(4)]
    assert {(each.rate, each.burst, each.concurrency, each.max_waiting) for each in parts} == {(2, 1, 1, 1)}
    assert Quota.unpack(quota.pack(3, 4)) == quota


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"concurrency": 7}, "concurrency = 7 is below spread = 8.*from 8, or a lower spread"),
        ({"rate": 100, "burst": 7.5}, "burst = 7.5 is below spread = 8.*from 8, or a lower spread"),
        ({"rate": 1e-6, "burst": 8}, "less than 0.000001 per second for each partition"),
        ({"spread": 0}, "spread = 0 is not from 1 to 4096"),
        ({"spread": True}, "spread = True is not a number"),
        ({"spread": 2.0}, "spread = 2.0 is not a whole number"),
    ],
)
def test_a_quota_that_cannot_be_divided_is_refused(parts: dict[str, float], problem: str) -> None:
    with pytest.raises(InvalidQuota, match=problem):
        Quota.parse({"spread": 8, **parts})
    assert Quota(spread=8, burst=1).burst == 1, "a burst without a rate has no effect"


def test_the_map_names_the_spreads_beside_its_text() -> None:
    first = PartitionMap(64, None, 3)
    begun = first.begin_spread("acme", 4)
    assert (str(begun), begun.old_partitions("acme")) == ("64<64#4", (52,))
    assert PartitionMap.parse(str(begun), begun.spreads_text).spreads == begun.spreads
    assert (begun.respread, len(begun.partitions("acme"))) == ("'acme'", 4)
    assert begun.moves("acme")
    assert not begun.moves("other")
    ended = begun.end()
    assert (str(ended), ended.spreads) == ("64#5", {"acme": (begun.partitions("acme"),) * 2})
    assert not ended.moves("acme")
    assert ended.begin_spread("acme", 1).end().spreads_text == ""
    with pytest.raises(ConfigurationError, match="are not spreads of tenants"):
        PartitionMap.parse("64#5", '{"acme": 4}')


def test_all_steps_of_the_map_keep_other_tenants_in_their_places() -> None:
    maps = [PartitionMap(16).begin_spread("acme", 4)]
    maps += [maps[0].end(), maps[0].end().begin(20)]
    for one, other in pairwise(maps):
        assert [one.home(str(each)) for each in range(50)] == [
            other.old_partitions(str(each))[0] for each in range(50)
        ]
