from __future__ import annotations

import pickle
import struct

import pytest
from hypothesis import given, strategies as st

from celery_dq.errors import InvalidQuota
from celery_dq.options import Quota
from celery_dq.options.quota import WHEN_FULL, WhenFull

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
    assert quota.pack() == struct.pack(">ddddBIB", 0, 1, 1, 0, 0, 0, 0)


def test_the_packed_form_is_the_one_of_the_scripts() -> None:
    quota = Quota(3, 10, 2.5, 8, max_waiting=10**9, when_full="dead_letter", paused=True)
    assert quota.pack() == struct.pack(">ddddBIB", 333_334, 10, 2.5, 8, 1, 10**9, 3)


@pytest.mark.parametrize(("number", "when_full"), [*enumerate(["refuse", "wait", "discard", "dead_letter"])])
def test_the_numbers_of_when_full_are_those_of_the_scripts(number: int, when_full: WhenFull) -> None:
    quota = Quota(max_waiting=1, when_full=when_full)
    assert quota.pack()[-1] == number
    assert Quota.unpack(quota.pack()) == quota


@pytest.mark.parametrize(
    ("quota", "text"),
    [
        (Quota(max_waiting=5), " max_waiting=5 when_full=refuse"),
        (Quota(max_waiting=5, when_full="discard", paused=True), " max_waiting=5 when_full=discard paused"),
        (Quota(when_full="discard"), "concurrency=unlimited"),
    ],
)
def test_the_text_of_a_quota_has_the_bound_of_its_backlog(quota: Quota, text: str) -> None:
    assert str(quota).endswith(text)


@pytest.mark.parametrize(
    ("quota", "named", "reported"),
    [
        (Quota(when_full="wait"), ("when_full",), "when_full = 'wait' has no effect without max_waiting"),
        (Quota(when_full="wait"), ("rate",), ""),
        (Quota(max_waiting=3, when_full="wait"), ("when_full",), ""),
        (Quota(burst=3), ("burst",), "burst = 3 has no effect without a rate"),
        (Quota(), ("burst", "when_full"), ""),
    ],
)
def test_a_part_without_effect_is_named_with_its_remedy(
    quota: Quota, named: tuple[str, ...], reported: str
) -> None:
    assert quota.without_effect(named).startswith(reported)
    assert bool(quota.without_effect(named)) == bool(reported)


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
        ({"max_waiting": 0}, "max_waiting = 0 is not from 1 to 1000000000"),
        ({"max_waiting": 10**9 + 1}, "max_waiting = 1000000001 is not from 1 to"),
        ({"max_waiting": 2.0}, "max_waiting = 2.0 is not a whole number or None; from 1 to 1000000000"),
        ({"max_waiting": True}, "max_waiting = True is not a number"),
        (
            {"max_waiting": 3, "spread": 4},
            "max_waiting = 3 is below spread = 4, .* give a max_waiting from 4",
        ),
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


def test_an_unknown_part_of_a_quota_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InvalidQuota, match=r"quota of '42': 'brust' is not a part .* mean 'burst'"):
        Quota.parse({"brust": 3}, where="quota of '42'")


@pytest.mark.parametrize("value", ["fast", 0])
def test_a_rate_that_cannot_be_read_is_an_invalid_quota(value: object) -> None:
    with pytest.raises(InvalidQuota, match="quota: rate ="):
        Quota.parse({"rate": value})


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"x" * 37,
        struct.pack(">ddddB", 0, 1, 1, 0, 0),
        struct.pack(">ddddBIB", -1, 1, 1, 0, 0, 0, 0),
        struct.pack(">ddddBIB", 0, 1, 1, 0, 0, 1, 4),
    ],
)
def test_other_bytes_are_no_quota(packed: bytes) -> None:
    with pytest.raises(InvalidQuota, match="a packed quota"):
        Quota.unpack(packed)


def test_a_quota_is_a_value() -> None:
    quota = Quota(rate=5)
    assert pickle.loads(pickle.dumps(quota)) == quota
    assert hash(quota) == hash(Quota(rate=5))
