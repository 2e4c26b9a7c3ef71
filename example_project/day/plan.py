"""The plan of the day: the notices for each merchant with their times. Pure and deterministic.

A day lasts from :data:`OPENS` to :data:`CLOSES` on the shop's clock. It is replayed in a few dozen seconds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OPENS, CLOSES = 6.0, 24.0
FLASH_SALE_AT = 10.0
KILL_AT = 10.75
"""Hour at which one worker is killed, during the backlog of the flash sale."""

CODE, ORDER, MARKETING = "code", "order", "marketing"
KINDS = (CODE, ORDER, MARKETING)
FLASH, SLOW, HANGING, FAILING, QUIET = "flash sale", "slow", "hanging", "failing", "quiet"


@dataclass(frozen=True)
class MerchantClass:
    """A class of merchants: the behaviour of the endpoint, the load, and the quota.

    ``latency`` is the time in seconds that the endpoint takes to answer (least, most). ``per_minute`` is the
    number of notices per minute of replay, and ``mix`` has the shares of codes, orders and marketing.
    ``rate`` (per second), ``burst`` and ``concurrency`` are the quota: the load that the endpoint accepts by
    contract.
    """

    name: str
    what: str
    latency: tuple[float, float]
    per_minute: int
    mix: tuple[float, float, float]
    rate: int
    burst: int
    concurrency: int


_ALL = (
    MerchantClass(
        FLASH, "one merchant, thousands of orders at ten", (0.01, 0.04), 5000, (0.1, 0.88, 0.02), 300, 50, 12
    ),
    MerchantClass(
        SLOW, "one merchant whose endpoint takes half a second", (0.4, 0.6), 300, (0.1, 0.7, 0.2), 50, 10, 4
    ),
    MerchantClass(
        HANGING, "one merchant whose endpoint never answers", (0.0, 0.0), 64, (0.1, 0.8, 0.1), 50, 10, 4
    ),
    MerchantClass(
        FAILING,
        "one merchant whose endpoint mostly answers 500",
        (0.01, 0.04),
        120,
        (0.1, 0.8, 0.1),
        50,
        10,
        2,
    ),
    MerchantClass(
        QUIET, "all the others, a notice or two each", (0.005, 0.04), 4800, (0.2, 0.6, 0.2), 50, 20, 4
    ),
)
CLASSES = {each.name: each for each in _ALL}

LOUD = (FLASH, SLOW, HANGING, FAILING)
"""The classes with one merchant each, the merchants 1 to 4. The quiet merchants follow."""

# Weights of the hours of the day from 06:00 on: a morning rise, a lunch peak, an evening peak.
_EVERYDAY = (2, 3, 4, 5, 6, 7, 8, 8, 6, 5, 5, 6, 7, 9, 9, 7, 4, 2)
_CAMPAIGNS = (0, 0, 1, 12, 4, 1, 1, 1, 1, 1, 6, 4, 1, 1, 0, 0, 0, 0)
_WEIGHTS = {CODE: _EVERYDAY, ORDER: _EVERYDAY, MARKETING: _CAMPAIGNS}
# Notices for the hanging endpoint come in groups, at two moments of the day.
_GROUPS = (9.0, 13.0)


@dataclass(frozen=True)
class Notice:
    """One notice of the plan: ``at`` is in seconds from the start of the replay."""

    id: str
    at: float
    merchant: int
    kind: str


def class_of(merchant: int) -> str:
    """Return the class of the merchant with a number."""
    return LOUD[merchant - 1] if merchant <= len(LOUD) else QUIET


def seconds(hour: float, minutes: float) -> float:
    """Return when an hour of the shop's clock comes, in seconds from the start of the replay."""
    return (hour - OPENS) / (CLOSES - OPENS) * minutes * 60


def clock(at: float, minutes: float) -> str:
    """Return the time on the shop's clock ``at`` seconds into the replay, for example ``"13:30"``."""
    hour = min(CLOSES, OPENS + at / (minutes * 60) * (CLOSES - OPENS))
    whole, minute = divmod(round(hour * 60), 60)
    return f"{whole:02d}:{minute:02d}"


def plan(seed: int, merchants: int, minutes: float) -> list[Notice]:
    """Return the notices of a day in the order of their times.

    Args:
        seed: Seed of the random numbers.
        merchants: Number of all merchants; at least five (four loud ones and a quiet one).
        minutes: Length of the replay. The number of notices per second does not depend on it.

    Raises:
        ValueError: A number is too small.
    """
    if merchants <= len(LOUD):
        raise ValueError(
            f"merchants={merchants}: at least {len(LOUD) + 1} are needed, four of them have parts"
        )
    if minutes <= 0:
        raise ValueError(f"minutes={minutes}: the day needs some time")
    rng = random.Random(seed)
    drafts: list[tuple[float, int, str]] = []
    for number, name in enumerate((*LOUD, QUIET), start=1):
        of_class = CLASSES[name]
        for position in range(max(3, round(of_class.per_minute * minutes))):
            kind = rng.choices(KINDS, of_class.mix)[0]
            merchant = number if name != QUIET else rng.randint(len(LOUD) + 1, merchants)
            drafts.append((_hour(rng, name, kind, position), merchant, kind))
    drafts.sort()
    return [
        Notice(f"n{number:06d}", seconds(hour, minutes), merchant, kind)
        for number, (hour, merchant, kind) in enumerate(drafts, start=1)
    ]


def _hour(rng: random.Random, name: str, kind: str, position: int) -> float:
    if name == FLASH and rng.random() < 0.94:
        return FLASH_SALE_AT + min(rng.expovariate(2.5), 3.0)
    if name == HANGING:
        return rng.choice(_GROUPS) + rng.random() * 0.05
    hours: Sequence[int] = _WEIGHTS[kind]
    return OPENS + rng.choices(range(len(hours)), hours)[0] + rng.random()


def batches(notices: Sequence[Notice], width: float = 0.05) -> Iterator[tuple[float, list[Notice]]]:
    """Group a plan by moments ``width`` seconds apart. Yield each moment with the notices due by then."""
    batch: list[Notice] = []
    due = width
    for notice in notices:
        if notice.at > due and batch:
            yield due, batch
            batch = []
        while notice.at > due:
            due += width
        batch.append(notice)
    if batch:
        yield due, batch
