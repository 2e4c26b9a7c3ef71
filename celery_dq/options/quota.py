"""What a tenant may take: rate, burst, weight, concurrency, or nothing while paused.

A quota is checked when it is made, so whoever holds one may use it. Its packed
form is what the scripts read in Redis.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from celery_dq.duration import SECOND_US, interval_us, parse_rate
from celery_dq.errors import ConfigurationError, InvalidQuota

__all__ = ["QUOTA_KEYS", "UNLIMITED", "Quota"]

MAX_RATE = 100_000.0
# One message in eleven days; below it, times due would leave the range that a double counts exactly.
MIN_RATE = 1e-6
MAX_BURST = 1_000_000.0
MIN_WEIGHT = 0.001
MAX_WEIGHT = 1_000.0
MAX_CONCURRENCY = 1_000_000

# interval µs (0 = unlimited), burst, weight, concurrency (0 = unlimited), paused 0/1
_PACKED = struct.Struct(">ddddB")

QUOTA_KEYS = ("rate", "burst", "weight", "concurrency", "paused")


@dataclass(frozen=True)
class Quota:
    """The limits of one tenant of one queue. Raises :exc:`~celery_dq.errors.InvalidQuota`.

    :param rate: messages per second in the long run, 0.000001 to 100,000; None (default) is unlimited.
    :param burst: messages that an idle tenant may take at once before `rate` holds, 1 (default) to
        1,000,000. Without a rate it has no effect.
    :param weight: share of what is left when all may run, relative to the others, 0.001 to 1,000;
        default 1.
    :param concurrency: messages that may run at the same time over all workers, 1 to 1,000,000;
        None (default) is unlimited.
    :param paused: True lets nothing start; the backlog stays. Default False.
    """

    rate: float | None = None
    burst: float = 1.0
    weight: float = 1.0
    concurrency: int | None = None
    paused: bool = False

    def __post_init__(self) -> None:
        if self.rate is not None:
            _check_range("rate", self.rate, MIN_RATE, MAX_RATE, "messages per second; None is unlimited")
        _check_range("burst", self.burst, 1, MAX_BURST, "messages")
        _check_range("weight", self.weight, MIN_WEIGHT, MAX_WEIGHT, "a share relative to other tenants")
        if self.concurrency is not None:
            if not isinstance(self.concurrency, int):
                raise InvalidQuota(f"concurrency = {self.concurrency!r} is not a whole number or None")
            _check_range(
                "concurrency", self.concurrency, 1, MAX_CONCURRENCY, "messages; to run none, set paused"
            )
        if not isinstance(self.paused, bool):
            raise InvalidQuota(f"paused = {self.paused!r} is not True or False")

    @property
    def interval_us(self) -> int:
        """Microseconds between two messages at this rate, rounded up; 0 is unlimited."""
        return 0 if self.rate is None else interval_us(self.rate)

    @classmethod
    def parse(cls, values: Mapping[str, object], *, base: Quota | None = None, where: str = "quota") -> Quota:
        """The quota that `values` spell (rate also as ``'50/s'``), over `base` for what they leave out.

        Raises :exc:`~celery_dq.errors.InvalidQuota`, naming `where`, for an unknown key or a bad value.
        """
        for key in values:
            if key not in QUOTA_KEYS:
                close = get_close_matches(str(key), QUOTA_KEYS, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(QUOTA_KEYS)}"
                raise InvalidQuota(f"{where}: {key!r} is no part of a quota: {hint}")
        changes = dict(values)
        try:
            if changes.get("rate") is not None:
                changes["rate"] = parse_rate(changes["rate"], option="rate")
            return replace(base or UNLIMITED, **changes)  # type: ignore[arg-type]  # checked by __post_init__
        except (ConfigurationError, InvalidQuota) as error:
            raise InvalidQuota(f"{where}: {error}") from None

    def pack(self) -> bytes:
        """The form that is stored: interval µs, burst, weight, concurrency, paused."""
        return _PACKED.pack(
            self.interval_us, self.burst, self.weight, self.concurrency or 0, 1 if self.paused else 0
        )

    @classmethod
    def unpack(cls, packed: bytes) -> Quota:
        """The quota that :meth:`pack` stored.

        Only the interval is stored, so the rate is the plainest one with that interval; packing it
        again gives the same bytes. Raises :exc:`~celery_dq.errors.InvalidQuota` for other bytes.
        """
        if len(packed) != _PACKED.size:
            raise InvalidQuota(f"a packed quota has {_PACKED.size} bytes, not {len(packed)}: {packed!r}")
        interval, burst, weight, concurrency, paused = _PACKED.unpack(packed)
        if not 0 <= interval <= SECOND_US / MIN_RATE:
            raise InvalidQuota(f"a packed quota has the impossible interval {interval!r} µs")
        return cls(
            rate=_plain_rate(int(interval)) if interval else None,
            burst=burst,
            weight=weight,
            concurrency=int(concurrency) or None,
            paused=bool(paused),
        )


def _check_range(name: str, value: object, low: float, high: float, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidQuota(f"{name} = {value!r} is not a number ({unit})")
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidQuota(f"{name} = {value!r} is not from {low:g} to {high:g} ({unit})")


def _plain_rate(interval: int) -> float:
    """The rate a person would have written for `interval` µs: whole per second, minute, hour or day."""
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
