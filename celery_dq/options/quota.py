"""The quota of a tenant: its rate, burst, weight, concurrency and backlog, and whether it is paused.

A quota is checked when it is made, so that each `Quota` object is valid. The scripts in Redis read its packed
form.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal, TypeAlias, get_args

from celery_dq.duration import SECOND_US, interval_us, parse_rate
from celery_dq.errors import ConfigurationError, InvalidQuota

__all__ = ["QUOTA_KEYS", "UNLIMITED", "Quota"]

MAX_RATE = 100_000.0
# One message in eleven days. With a lower rate, next allowed times would exceed the exact range of a double.
MIN_RATE = 1e-6
MAX_BURST = 1_000_000.0
MIN_WEIGHT = 0.001
MAX_WEIGHT = 1_000.0
MAX_CONCURRENCY = 1_000_000
MAX_WAITING = 1_000_000_000
#: As many as a queue may have partitions.
MAX_SPREAD = 4_096

#: What a push does when as many messages wait as may: `include/backlog_bound.lua` has the numbers, too.
WhenFull: TypeAlias = Literal["refuse", "wait", "discard", "dead_letter"]
WHEN_FULL: tuple[WhenFull, ...] = get_args(WhenFull)

# interval µs (0 = unlimited), burst, weight, concurrency (0 = unlimited), paused 0/1, max_waiting
# (0 = unlimited), place of when_full in WHEN_FULL
_PACKED = struct.Struct(">ddddBIB")
# Behind the packed share of a spread tenant: the whole quota, and the number of shares.
_SPREAD = struct.Struct(">H")

QUOTA_KEYS = ("rate", "burst", "weight", "concurrency", "max_waiting", "when_full", "paused")
#: The parts of the quota of one tenant.
TENANT_QUOTA_KEYS = (*QUOTA_KEYS, "spread")


@dataclass(frozen=True)
class Quota:
    """The limits of one tenant of one queue.

    Attributes:
        rate: Messages per second in the long run, 0.000001 to 100,000; None (default) is unlimited.
        burst: Messages that an idle tenant may start at once before `rate` applies, 1 (default) to 1,000,000.
            It has no effect without a rate.
        weight: Share of the free capacity relative to other tenants, 0.001 to 1,000; default 1.
        concurrency: Messages that may run at the same time over all workers, 1 to 1,000,000; None (default)
            is unlimited.
        max_waiting: Messages that may wait for their turn, 1 to 1,000,000,000; None (default) is unlimited.
            Delayed messages and those behind a dedup lock do not count until they wait for their turn.
        when_full: What happens to a call when that many wait. ``refuse`` (default) raises
            :exc:`~celery_dq.errors.QueueFull`, ``wait`` does so after two thirds of ``dq_publish_timeout``;
            ``discard`` accepts it and discards the first messages of the backlog, and ``dead_letter`` keeps
            those as dead letters. It has no effect without `max_waiting`.
        paused: Whether no message may start; the backlog stays. Default False.
        spread: Number of partitions of the queue in which the tenant lives, 1 (default) to 4,096. Each has a
            share of rate, burst, concurrency and max_waiting, and the whole weight.

    Raises:
        InvalidQuota: A value has the wrong type or is out of range, or `burst`, `concurrency`, `max_waiting`
            or `rate` is too small to be divided.
    """

    rate: float | None = None
    burst: float = 1.0
    weight: float = 1.0
    concurrency: int | None = None
    max_waiting: int | None = None
    when_full: WhenFull = "refuse"
    paused: bool = False
    spread: int = 1

    def __post_init__(self) -> None:
        if self.rate is not None:
            _check_range("rate", self.rate, MIN_RATE, MAX_RATE, "messages per second; None is unlimited")
        _check_range("burst", self.burst, 1, MAX_BURST, "messages")
        _check_range("weight", self.weight, MIN_WEIGHT, MAX_WEIGHT, "a share relative to other tenants")
        _check_count("concurrency", self.concurrency, MAX_CONCURRENCY, "messages; to run none, set paused")
        _check_count("max_waiting", self.max_waiting, MAX_WAITING, "messages; None is unlimited")
        if self.when_full not in WHEN_FULL:
            raise InvalidQuota(f"when_full = {self.when_full!r} is not one of {', '.join(WHEN_FULL)}")
        if not isinstance(self.paused, bool):
            raise InvalidQuota(f"paused = {self.paused!r} is not True or False")
        if not isinstance(self.spread, int):
            raise InvalidQuota(f"spread = {self.spread!r} is not a whole number from 1 to {MAX_SPREAD}")
        _check_range("spread", self.spread, 1, MAX_SPREAD, "partitions")
        if self.spread > 1:
            self._check_shares()

    def _check_shares(self) -> None:
        spread = self.spread
        for name, count in (("concurrency", self.concurrency), ("max_waiting", self.max_waiting)):
            if count is not None and count < spread:
                raise InvalidQuota(
                    f"{name} = {count} is below spread = {spread}, and each of the {spread} partitions needs "
                    f"at least 1: give a {name} from {spread}, or a lower spread"
                )
        if self.rate is not None and self.burst < spread:
            raise InvalidQuota(
                f"burst = {_show(self.burst)} is below spread = {spread}, and each of the {spread} "
                f"partitions needs at least 1: give a burst from {spread}, or a lower spread"
            )
        if self.rate is not None and self.rate / spread < MIN_RATE:
            raise InvalidQuota(
                f"rate = {self.rate!r} with spread = {spread} is less than {_show(MIN_RATE)} per second for "
                "each partition: give a lower spread"
            )

    def __str__(self) -> str:
        """Return all parts, in the form of the options of ``celery dq quotas set``."""
        concurrency = "unlimited" if self.concurrency is None else str(self.concurrency)
        paused = " paused" if self.paused else ""
        spread = f" spread={self.spread}" if self.spread > 1 else ""
        bound = ""
        if self.names_bound:
            most = "unlimited" if self.max_waiting is None else str(self.max_waiting)
            bound = f" max_waiting={most} when_full={self.when_full}"
        parts = f"rate={self.rate_text} burst={self.burst:g} weight={self.weight:g} concurrency={concurrency}"
        return parts + bound + spread + paused

    def without_effect(self, base: Quota) -> str:
        """Return which changed part has no effect, and the remedy; "" when each one has an effect.

        Args:
            base: The quota before the change. A part that stayed may wait for its counterpart.
        """
        if self.rate is None and self.burst not in (1, base.burst):
            return f"burst = {self.burst:g} has no effect without a rate: set a rate, too, or burst = 1"
        if self.max_waiting is None and self.when_full not in ("refuse", base.when_full):
            return (
                f"when_full = {self.when_full!r} has no effect without max_waiting: set max_waiting, too, or "
                "when_full = 'refuse'"
            )
        return ""

    @property
    def names_bound(self) -> bool:
        """Whether ``max_waiting`` or ``when_full`` differs from its default."""
        return self.max_waiting is not None or self.when_full != "refuse"

    @property
    def spelled_rate(self) -> str | float | None:
        """The rate as a text such as ``50/m``, or as the number per second if that has no short form."""
        for unit, seconds in (("s", 1), ("m", 60), ("h", 3_600), ("d", 86_400)):
            exact = (self.rate or 0) * seconds
            # A stored rate is a little lower than the one that was given, because its interval is rounded up.
            for number in (round(exact), math.ceil(exact)):
                if number and interval_us(number / seconds) == self.interval_us:
                    return f"{number}/{unit}"
        return self.rate

    @property
    def rate_text(self) -> str:
        """The rate as a text: ``unlimited``, such as ``50/m``, or per second, rounded."""
        if self.rate is None:
            return "unlimited"
        spelled = self.spelled_rate
        return spelled if isinstance(spelled, str) else f"{self.rate:g}/s"

    @property
    def interval_us(self) -> int:
        """Microseconds between two messages at this rate, rounded up; 0 is unlimited."""
        return 0 if self.rate is None else interval_us(self.rate)

    @classmethod
    def parse(cls, values: Mapping[str, object], *, base: Quota | None = None, where: str = "quota") -> Quota:
        """Make a quota from a mapping.

        Args:
            values: The parts of the quota; the rate may also be text such as ``'50/s'``.
            base: Quota with the parts that `values` omits; default unlimited.
            where: Name of the mapping, for the error.

        Raises:
            InvalidQuota: A key is unknown, or a value has the wrong type or is out of range.
        """
        for key in values:
            if key not in TENANT_QUOTA_KEYS:
                close = get_close_matches(str(key), TENANT_QUOTA_KEYS, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(TENANT_QUOTA_KEYS)}"
                raise InvalidQuota(f"{where}: {key!r} is not a part of a quota: {hint}")
        changes = dict(values)
        try:
            if changes.get("rate") is not None:
                changes["rate"] = _parse_rate(changes["rate"])
            return replace(base or UNLIMITED, **changes)  # type: ignore[arg-type]  # checked by __post_init__
        except (ConfigurationError, InvalidQuota) as error:
            raise InvalidQuota(f"{where}: {error}") from None

    def pack(self, share: int = 0, shares: int | None = None) -> bytes:
        """Return the stored form: interval µs, burst, weight, concurrency, paused, max_waiting, when_full.

        That of a spread tenant begins with one share in this form. The shares of a count differ by one at
        most, and their sum is exact. Behind it stand the whole quota and the spread, for :meth:`unpack`.

        Args:
            share: Number of the share.
            shares: Number of shares; default: the spread. It is another one while the spread changes.
        """
        shares = self.spread if shares is None else shares
        whole = self._packed(self.interval_us, self.burst, self.concurrency, self.max_waiting)
        if shares == self.spread == 1:
            return whole
        counts = (count_of_share(count, share, shares) for count in (self.concurrency, self.max_waiting))
        part = self._packed(shares * self.interval_us, max(self.burst / shares, 1), *counts)
        return part + whole + _SPREAD.pack(self.spread)

    def _packed(self, interval: int, burst: float, concurrency: int | None, waiting: int | None) -> bytes:
        limits = (interval, burst, self.weight, concurrency or 0, 1 if self.paused else 0)
        return _PACKED.pack(*limits, waiting or 0, WHEN_FULL.index(self.when_full))

    @classmethod
    def unpack(cls, packed: bytes) -> Quota:
        """Return the quota that :meth:`pack` packed.

        Only the interval is stored, so the rate is the simplest number with that interval. Packing the result
        gives the same bytes.

        Raises:
            InvalidQuota: The bytes are not a packed quota.
        """
        spread = 1
        if len(packed) == 2 * _PACKED.size + _SPREAD.size:
            (spread,), packed = (
                _SPREAD.unpack_from(packed, -_SPREAD.size),
                packed[_PACKED.size : -_SPREAD.size],
            )
        if len(packed) != _PACKED.size:
            raise InvalidQuota(f"a packed quota has {_PACKED.size} bytes, not {len(packed)}: {packed!r}")
        interval, burst, weight, concurrency, paused, waiting, when_full = _PACKED.unpack(packed)
        if not 0 <= interval <= SECOND_US / MIN_RATE:
            raise InvalidQuota(f"a packed quota has the impossible interval {interval!r} µs")
        if when_full >= len(WHEN_FULL):
            raise InvalidQuota(f"a packed quota has the impossible number {when_full} for when_full")
        return cls(
            rate=_plain_rate(int(interval)) if interval else None,
            burst=burst,
            weight=weight,
            concurrency=int(concurrency) or None,
            max_waiting=waiting or None,
            when_full=WHEN_FULL[when_full],
            paused=bool(paused),
            spread=spread,
        )


def count_of_share(count: int | None, share: int, shares: int) -> int | None:
    """Return how many of `count` messages belong to a share, at least 1; None for unlimited."""
    if count is None:
        return None
    least, more = divmod(count, shares)
    return max(least + (share < more), 1)


def quota_of_bytes(packed: bytes | None) -> Quota | None:
    """Return a stored quota; None without one, and for bytes of another form, which scripts ignore."""
    try:
        return Quota.unpack(packed) if packed else None
    except InvalidQuota:
        return None


def _parse_rate(value: object) -> float:
    try:
        return parse_rate(value, option="rate")
    except ConfigurationError as error:
        bounds = f"from {_show(MIN_RATE)} to {_show(MAX_RATE)} per second, or None for unlimited"
        raise InvalidQuota(f"{error}; {bounds}") from None


def _check_count(name: str, count: object, most: int, unit: str) -> None:
    if count is None:
        return
    if not isinstance(count, int):
        raise InvalidQuota(
            f"{name} = {count!r} is not a whole number or None; from 1 to {_show(most)} messages"
        )
    _check_range(name, count, 1, most, unit)


def _check_range(name: str, value: object, low: float, high: float, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidQuota(f"{name} = {value!r} is not a number from {_show(low)} to {_show(high)} ({unit})")
    if not low <= value <= high:  # excludes nan too
        raise InvalidQuota(f"{name} = {value!r} is not from {_show(low)} to {_show(high)} ({unit})")


def _show(bound: float) -> str:
    """Return a bound as text without an exponent."""
    return f"{bound:f}".rstrip("0").rstrip(".")


def _plain_rate(interval: int) -> float:
    """Return the simplest rate with this interval in µs: a whole number per s, min, h or day if possible."""
    for unit_s in (1, 60, 3_600, 86_400):
        per_unit = round(unit_s * SECOND_US / interval)
        if per_unit and interval_us(per_unit / unit_s) == interval:
            return per_unit / unit_s
    for digits in range(1, 17):
        rate = float(f"{SECOND_US / interval:.{digits}g}")
        if rate <= MAX_RATE and interval_us(rate) == interval:
            return rate
    return SECOND_US / interval


UNLIMITED = Quota()
