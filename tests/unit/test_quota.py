from __future__ import annotations

import pickle
import struct
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from celery_dq.errors import InvalidQuota
from celery_dq.options import Quota
from celery_dq.options.quota import WHEN_FULL

PACKED = ">ddddBIB"

quotas = st.builds(
    Quota,
    rate=st.none() | st.floats(1e-6, 100_000),
    burst=st.floats(1, 1_000_000),
    weight=st.floats(0.001, 1_000),
    concurrency=st.none() | st.integers(1, 1_000_000),
    max_waiting=st.none() | st.integers(1, 1_000_000_000),
    when_full=st.sampled_from(WHEN_FULL),
    paused=st.booleans(),
)


def test_a_quota_that_reports_nothing_limits_nothing() -> None:
    quota = Quota()
    assert quota.interval_us == 0
    assert quota.pack() == struct.pack(PACKED, 0, 1, 1, 0, 0, 0, 0)


def test_the_packed_form_is_the_one_of_the_scripts() -> None:
    quota = Quota(
        rate=3, burst=10, weight=2.5, concurrency=8, max_waiting=500, when_full="discard", paused=True
    )
    assert quota.pack() == struct.pack(PACKED, 333_334, 10, 2.5, 8, 1, 500, 2)


def test_the_numbers_of_when_full_are_those_of_the_scripts() -> None:
    assert WHEN_FULL == ("refuse", "wait", "discard", "dead_letter")


@given(quotas)
def test_unpacking_and_packing_again_changes_nothing(quota: Quota) -> None:
    assert Quota.unpack(quota.pack()).pack() == quota.pack()


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (5 / 3600, "rate=5/h"),
        (50 / 60, "rate=50/m"),
        # One message in 1,112 whole µs is stored for it.
        (900.0, "rate=900/s"),
        (0.123456789, "rate=0.123457/s"),
        (None, "rate=unlimited"),
    ],
)
def test_the_text_of_a_stored_quota_has_the_rate_that_a_person_wrote(rate: float | None, text: str) -> None:
    assert str(Quota.unpack(Quota(rate=rate).pack())).startswith(text)


@pytest.mark.parametrize("rate", [50, 3, 0.5, 7 / 60, 10 / 3600, 1 / 86_400, 1000, None])
def test_a_rate_that_a_person_wrote_comes_back(rate: float | None) -> None:
    assert Quota.unpack(Quota(rate=rate).pack()).rate == rate


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        ({"rate": 0}, "rate = 0 is not from"),
        ({"rate": 100_001}, "rate = 100001"),
        ({"rate": float("nan")}, "rate = nan"),
        ({"rate": "50/s"}, "rate = '50/s' is not a number"),
        ({"rate": True}, "rate = True"),
        ({"burst": 0.5}, "burst = 0.5 is not from 1 to"),
        ({"weight": 0}, "weight = 0 is not from 0.001 to 1000"),
        ({"weight": 1001}, "weight = 1001"),
        ({"concurrency": 0}, "concurrency = 0 .* set paused"),
        ({"concurrency": 1.5}, "concurrency = 1.5 is not a whole number"),
        ({"concurrency": True}, "concurrency = True"),
        ({"max_waiting": 0}, r"max_waiting = 0 is not from 1 to 1000000000 \(messages; None is unlimited\)"),
        ({"max_waiting": 1_000_000_001}, "max_waiting = 1000000001"),
        ({"max_waiting": 1.5}, "max_waiting = 1.5 is not a whole number"),
        ({"max_waiting": True}, "max_waiting = True"),
        ({"when_full": "drop"}, "when_full = 'drop' is not one of refuse, wait, discard, dead_letter"),
        ({"when_full": None}, "when_full = None is not one of"),
        ({"paused": 1}, "paused = 1 is not True or False"),
    ],
)
def test_an_impossible_quota_is_refused(wrong: dict[str, object], reported: str) -> None:
    with pytest.raises(InvalidQuota, match=reported):
        Quota(**wrong)  # type: ignore[arg-type]


def test_a_quota_is_read_over_a_base() -> None:
    base = Quota(rate=5, burst=3, weight=2)
    assert Quota.parse({"rate": "3000/m", "paused": True}, base=base) == Quota(50, 3, 2, paused=True)
    assert Quota.parse({"rate": None}, base=base) == Quota(None, 3, 2)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, "concurrency=unlimited"),
        ({"max_waiting": 500}, "max_waiting=500 when_full=refuse"),
        ({"max_waiting": 500, "when_full": "wait"}, "max_waiting=500 when_full=wait"),
        # The choice outlives the bound, so a quota that differs by it alone has another text.
        ({"when_full": "wait"}, "max_waiting=unlimited when_full=wait"),
    ],
)
def test_the_text_of_a_quota_has_its_bound(parts: dict[str, object], text: str) -> None:
    assert str(Quota.parse(parts)).endswith(text)


@pytest.mark.parametrize(
    ("quota", "problem"),
    [
        (
            Quota(when_full="wait"),
            "when_full = 'wait' has no effect without max_waiting: set max_waiting, too, or when_full = 'ref",
        ),
        (Quota(burst=3), "burst = 3 has no effect without a rate: set a rate, too, or burst = 1"),
    ],
)
def test_a_changed_part_without_an_effect_is_named_with_the_remedy(quota: Quota, problem: str) -> None:
    assert quota.without_effect(Quota()).startswith(problem)
    assert quota.without_effect(quota) == "", "it was chosen before, and stays"
    assert replace(quota, rate=5, max_waiting=5).without_effect(Quota()) == ""


def test_an_unknown_part_of_a_quota_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InvalidQuota, match=r"quota of '42': 'brust' is not a part .* mean 'burst'"):
        Quota.parse({"brust": 3}, where="quota of '42'")


@pytest.mark.parametrize("value", ["fast", 0])
def test_a_rate_that_cannot_be_read_is_an_invalid_quota(value: object) -> None:
    with pytest.raises(InvalidQuota, match="quota: rate ="):
        Quota.parse({"rate": value})


@pytest.mark.parametrize(
    "packed",
    [b"", b"x" * 32, struct.pack(PACKED, -1, 1, 1, 0, 0, 0, 0), struct.pack(PACKED, 0, 1, 1, 0, 0, 9, 4)],
)
def test_other_bytes_are_no_quota(packed: bytes) -> None:
    with pytest.raises(InvalidQuota, match="a packed quota"):
        Quota.unpack(packed)


def test_a_quota_is_a_value() -> None:
    quota = Quota(rate=5)
    assert pickle.loads(pickle.dumps(quota)) == quota
    assert hash(quota) == hash(Quota(rate=5))
