"""How fast tenants with a backlog are served, beside the rate that their quota and their weight allow."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from celery_dq.inspector.queue_counters import WaitingTimes
from celery_dq.inspector.redis_values import number
from celery_dq.options import Quota

Cap: TypeAlias = Literal["rate", "concurrency", "weight", "pause", "queue pause", ""]

#: The fields of the hash ``state`` that :meth:`PartitionPace.read` reads.
PACE_FIELDS = ("v", "claim_window", "waits_alone", "waits_in_line", "paused_until")
#: The claim that ends a window of ``include/place_served.lua`` comes after this time, µs.
WINDOW_US = 60_000_000
#: A shorter time shows no rate, µs.
_SHORTEST_US = 1_000_000
_ENTRY = struct.Struct(">ddddd25x")
_PACE = struct.Struct(">dddddd")


@dataclass(frozen=True)
class ServiceRate:
    """How fast a tenant with a backlog is served.

    The broker counts the claims of a tenant from the first one that leaves a backlog until none is left. The
    rates are of the last one to two minutes, or since that claim; of a tenant with less than one claim a
    minute, since its claim before last. A released message counts at each of its claims. The rates of
    a spread tenant are those of its partitions together.

    Attributes:
        got_per_s: Claimed messages per second. None without a backlog, and in its first second.
        due_per_s: The lower one of the quota's rate and of ``by_weight_per_s``; 0 in a pause. None without a
            rate while the worth of a weight is not known.
        by_weight_per_s: The rate that its weight is worth beside the other tenants, as long as it always has
            a backlog; None while that is not known.
        claimed_per_s: All claims of its partition per second; None while that is not known.
        share_got: Its part of all claims of its partition, 0 to 1.
        share_by_weight: The part that its weight alone gives it, 0 to 1.
        over_s: Seconds for which ``got_per_s`` was counted; 0 without it.
        capped_by: The cap that holds it back now: ``rate``, ``concurrency``, ``weight`` (it waits for its
            turn, or for a free worker), ``pause`` or ``queue pause``; "" without a backlog.
    """

    got_per_s: float | None = None
    due_per_s: float | None = None
    by_weight_per_s: float | None = None
    claimed_per_s: float | None = None
    share_got: float | None = None
    share_by_weight: float | None = None
    over_s: float = 0.0
    capped_by: Cap = ""

    @classmethod
    def of(
        cls,
        got: float | None,
        by_weight: float | None,
        claimed: float | None,
        rate: float | None,
        over_s: float,
        capped_by: Cap,
    ) -> ServiceRate:
        """Return the service of a tenant with a backlog; `rate` is that of its quota, None for unlimited."""
        due = min((each for each in (rate, by_weight) if each is not None), default=None)
        return cls(
            got_per_s=got,
            due_per_s=0.0 if capped_by in ("pause", "queue pause") else due,
            by_weight_per_s=by_weight,
            claimed_per_s=claimed,
            share_got=_part(got, claimed),
            share_by_weight=_part(by_weight, claimed),
            over_s=over_s,
            capped_by=capped_by,
        )

    @property
    def rate(self) -> str:
        """The rate got, and the rate due."""
        return _beside(spelled_speed(self.got_per_s), spelled_speed(self.due_per_s))

    @property
    def share(self) -> str:
        """The share got, and the share by weight."""
        return _beside(spelled_share(self.share_got), spelled_share(self.share_by_weight))


def total_service(found: Sequence[ServiceRate], rate: float | None) -> ServiceRate:
    """Return how fast a spread tenant is served in its partitions together.

    Its shares are due the same rate each, so that one which no worker serves is seen. A weight is worth all
    claims of the partitions, divided by all weights in them.

    Args:
        found: The service in each of its partitions, that of its state first.
        rate: The rate of its whole quota; None for unlimited.
    """
    shares = [each for each in found if each.capped_by]
    if not shares:
        return found[0]
    claimed = _sum(each.claimed_per_s for each in shares)
    # In units of its own weight, which is all that is known of a partition without claims.
    weights = sum(
        each.claimed_per_s / each.by_weight_per_s if each.claimed_per_s and each.by_weight_per_s else 1.0
        for each in shares
    )
    is_known = any(each.by_weight_per_s for each in shares)
    by_weight = len(shares) * claimed / weights if is_known and claimed else None
    over_s = max(each.over_s for each in shares)
    return ServiceRate.of(
        _sum(each.got_per_s for each in shares), by_weight, claimed, rate, over_s, found[0].capped_by
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return sum(known) if known else None


def _part(per_s: float | None, claimed_per_s: float | None) -> float | None:
    return None if per_s is None or not claimed_per_s else min(per_s / claimed_per_s, 1.0)


def _beside(got: str, due: str) -> str:
    return got if got == due == "-" else f"{got} of {due}"


def spelled_speed(per_s: float | None) -> str:
    """Return a measured rate per second, minute or hour; "-" for None."""
    if per_s is None:
        return "-"
    for size, unit in ((1, "s"), (60, "m")):
        if per_s * size >= 1 or per_s == 0:
            return f"{per_s * size:.3g}/{unit}" if per_s * size < 1000 else f"{per_s * size:.0f}/{unit}"
    return f"{per_s * 3600:.2g}/h"


def spelled_share(part: float | None) -> str:
    """Return a part of 1 in percent; "-" for None."""
    return "-" if part is None else f"{part * 100:.2g}%" if part < 0.995 else "100%"


@dataclass(frozen=True)
class RunningEntry:
    """An entry of the hash ``running``, see ``include/running.lua``.

    Attributes:
        slots: Number of slots that the tenant's in-flight messages take.
        since_us: When the present window began, µs; 0 without a backlog.
        claimed: Messages that were claimed since then.
        before_us: When the window before began, µs.
        claimed_before: Messages that were claimed in it.
    """

    slots: int = 0
    since_us: float = 0.0
    claimed: int = 0
    before_us: float = 0.0
    claimed_before: int = 0

    @classmethod
    def unpack(cls, entry: bytes | None) -> RunningEntry:
        """Return an entry, packed or not."""
        if entry is None or len(entry) != _ENTRY.size:
            return cls(int(number(entry)))
        slots, since_us, claimed, before_us, claimed_before = _ENTRY.unpack(entry)
        return cls(int(slots), since_us, int(claimed), before_us, int(claimed_before))

    def got_per_s(self, now_us: float) -> float | None:
        """Return how many messages were claimed per second; None when that is not known."""
        span = now_us - self.before_us
        if not self.since_us or span < _SHORTEST_US:
            return None
        found = (self.claimed + self.claimed_before) * 1e6 / span
        # A claim behind the window would have begun another one, so none has come for this time.
        quiet = now_us - self.since_us - WINDOW_US
        return min(found, 1e6 / quiet) if quiet > 0 else found


@dataclass(frozen=True)
class PartitionPace:
    """How fast the claims of a partition go on.

    Attributes:
        now_us: The server's time, µs.
        claimed_per_s: Claimed messages per second; None when that is not known.
        per_weight: Messages per second that a weight of 1 is worth: the speed of virtual time; None when that
            is not known.
        is_paused: Whether the queue is paused.
    """

    now_us: float
    claimed_per_s: float | None = None
    per_weight: float | None = None
    is_paused: bool = False

    @classmethod
    def read(cls, values: Sequence[bytes | None], now: tuple[int, int]) -> PartitionPace:
        """Return the pace from the values of :data:`PACE_FIELDS` and the time, read at one moment."""
        v, window, alone, in_line, paused_until = values
        now_us = now[0] * 1e6 + now[1]
        is_paused = number(paused_until) > now_us
        if window is None or len(window) != _PACE.size:
            return cls(now_us, is_paused=is_paused)
        *_, before_us, claimed_before, v_before = _PACE.unpack(window)
        span_s = (now_us - before_us) / 1e6
        if span_s * 1e6 < _SHORTEST_US:
            return cls(now_us, is_paused=is_paused)
        claimed = WaitingTimes.unpack(alone).count + WaitingTimes.unpack(in_line).count
        # Until all tenants in line had a turn, nothing is known about the worth of a weight.
        per_weight = (number(v) - v_before) / span_s or None
        return cls(now_us, (claimed - claimed_before) / span_s, per_weight, is_paused)

    def service(self, entry: RunningEntry, state: str, quota: Quota) -> ServiceRate:
        """Return how fast a tenant is served.

        Args:
            entry: Its entry of the hash ``running``.
            state: Its state, as :class:`~celery_dq.inspector.tenants.TenantSnapshot` has it.
            quota: The quota in force.
        """
        if state not in _CAPS:
            return ServiceRate()
        got = entry.got_per_s(self.now_us)
        by_weight = None if self.per_weight is None else self.per_weight * quota.weight
        over_s = 0.0 if got is None else (self.now_us - entry.before_us) / 1e6
        cap = "queue pause" if self.is_paused else _CAPS[state]
        return ServiceRate.of(got, by_weight, self.claimed_per_s, quota.rate, over_s, cap)


_CAPS: dict[str, Cap] = {
    "eligible": "weight",
    "throttled": "rate",
    "at_concurrency": "concurrency",
    "paused": "pause",
}
