from __future__ import annotations

from datetime import timedelta
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from celery_dq.duration import format_duration, interval_us, parse_duration, parse_rate
from celery_dq.errors import ConfigurationError


@pytest.mark.parametrize(
    ("value", "us"),
    [
        (15, 15_000_000),
        (0, 0),
        (0.1, 100_000),
        (1e-7, 0),
        (timedelta(days=1, microseconds=3), 86_400_000_003),
        ("250ms", 250_000),
        ("15s", 15_000_000),
        (" 1.5 s ", 1_500_000),
        ("5m", 300_000_000),
        ("5min", 300_000_000),
        ("2h", 7_200_000_000),
        ("7d", 604_800_000_000),
        ("9us", 9),
    ],
)
def test_durations_are_exact(value: object, us: int) -> None:
    assert parse_duration(value, option="dq_lease") == us


@pytest.mark.parametrize(
    "value", [True, None, "15", "s", "-3s", "5 weeks", "", [], float("nan"), float("inf"), "1e3s", 10**400]
)
def test_a_wrong_duration_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"dq_lease = .* is not a duration: give a timedelta"):
        parse_duration(value, option="dq_lease")


@pytest.mark.parametrize("value", [-1, -0.5, timedelta(seconds=-1)])
def test_a_negative_duration_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="dq_lease = .* is negative"):
        parse_duration(value, option="dq_lease")


@given(st.integers(0, 10**15))
def test_a_duration_that_is_shown_reads_back(us: int) -> None:
    assert parse_duration(format_duration(us), option="shown") == us


@pytest.mark.parametrize(
    ("value", "rate"), [("50/s", 50), ("3000/m", 50), ("3000/min", 50), ("36/h", 0.01), (0.5, 0.5), (7, 7)]
)
def test_rates_are_per_second(value: object, rate: float) -> None:
    assert parse_rate(value, option="rate") == rate


@pytest.mark.parametrize("value", ["50", "50/w", "/s", True, None, float("inf"), "fast", 10**400])
def test_a_wrong_rate_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigurationError, match="rate = .* is not a rate: give a number per second"):
        parse_rate(value, option="rate")


@pytest.mark.parametrize("value", [0, -3, "0/s"])
def test_a_rate_of_nothing_points_to_paused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="paused = True"):
        parse_rate(value, option="rate")


@pytest.mark.parametrize("count", range(1, 200))
@pytest.mark.parametrize(("unit", "seconds"), [("s", 1), ("m", 60), ("h", 3_600), ("d", 86_400)])
def test_the_interval_is_the_exact_one_rounded_up(count: int, unit: str, seconds: int) -> None:
    exact = Fraction(seconds * 1_000_000, count)
    rate = parse_rate(f"{count}/{unit}", option="rate")
    assert interval_us(rate) == -(-exact.numerator // exact.denominator)
