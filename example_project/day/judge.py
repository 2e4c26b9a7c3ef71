"""The verdict on a day, computed from the ledger. Pure.

A notice is *delivered* when its endpoint answered 2xx. It is *given up* when all attempts of the platform
failed. All other published notices are *missing*: *held* when the broker still keeps them for the dead
worker, *queued* when they still wait in the broker, and otherwise *lost*.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from day.ledger import Arrival, Published
from day.plan import CLASSES, KINDS, QUIET, Notice, class_of
from shop.webhook import MAX_ATTEMPTS, TIMEOUT


@dataclass(frozen=True)
class Kill:
    """The killed worker and the time of the kill (Unix time)."""

    worker: int
    at: float


@dataclass(frozen=True)
class Sample:
    """The time from the publish of a notice to the first request at its endpoint.

    ``at`` is the time of the publish in seconds into the day. ``delay`` is None without a request within the
    run.
    """

    merchant_class: str
    kind: str
    at: float
    delay: float | None


@dataclass(frozen=True)
class Delays:
    """Delivery delays of a group of notices, in seconds; NaN when none arrived.

    ``unheard`` counts the notices of which no endpoint got a request within the run.
    """

    group: str
    count: int
    unheard: int
    p50: float
    p95: float
    p99: float
    max: float


@dataclass
class Verdict:
    """The outcome of all published notices.

    ``held_in_all`` also counts notices that the dead worker had delivered already and that will be delivered
    again.
    """

    published: int = 0
    delivered: int = 0
    given_up: int = 0
    held: int = 0
    held_in_all: int = 0
    queued: int = 0
    lost: int = 0
    retries: int = 0
    duplicates_by_kill: int = 0
    duplicates_by_timeout: int = 0
    duplicates_unexplained: int = 0
    lost_ids: list[str] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """Count of the notices that were neither delivered nor given up within the run."""
        return self.held + self.queued + self.lost

    @property
    def duplicates(self) -> int:
        """Count of the requests that an endpoint had received before."""
        return self.duplicates_by_kill + self.duplicates_by_timeout + self.duplicates_unexplained

    @property
    def clean(self) -> bool:
        """Whether no notice is missing, and each duplicate has a reason."""
        return not self.missing and not self.duplicates_unexplained

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers, for JSON."""
        return {**asdict(self), "missing": self.missing, "duplicates": self.duplicates, "clean": self.clean}


def judge(
    published: Sequence[Published],
    arrivals: Iterable[Arrival],
    kill: Kill | None,
    held: Collection[str] = (),
    queued: Collection[str] = (),
) -> Verdict:
    """Judge a day.

    Args:
        published: All published notices.
        arrivals: All requests at the endpoints.
        kill: The killed worker; None without a kill.
        held: Ids that the broker keeps for a dead worker.
        queued: Ids that still wait in the broker.
    """
    by_notice: dict[str, list[Arrival]] = {}
    for arrival in sorted(arrivals, key=lambda each: each.at):
        by_notice.setdefault(arrival.id, []).append(arrival)
    verdict = Verdict(published=len(published), held_in_all=len(held))
    for notice in published:
        requests = by_notice.get(notice.id, [])
        if any(200 <= request.status < 300 for request in requests):
            verdict.delivered += 1
        elif any(request.attempt >= MAX_ATTEMPTS for request in requests):
            verdict.given_up += 1
        elif notice.id in held:
            verdict.held += 1
        elif notice.id in queued:
            verdict.queued += 1
        else:
            verdict.lost += 1
            verdict.lost_ids.append(notice.id)
        _count_repeats(verdict, requests, kill)
    return verdict


def _count_repeats(verdict: Verdict, requests: Sequence[Arrival], kill: Kill | None) -> None:
    """Count the second and later requests of one notice, as retries or as duplicates by reason."""
    for position, request in enumerate(requests[1:], start=1):
        before = requests[:position]
        again = any(earlier.attempt == request.attempt for earlier in before)
        accepted = any(200 <= earlier.status < 300 for earlier in before)
        if not again and not accepted:
            verdict.retries += 1
        elif kill and any(_in_hand(earlier, kill) for earlier in before):
            verdict.duplicates_by_kill += 1
        elif accepted and not again and any(request.at - earlier.at >= TIMEOUT for earlier in before):
            verdict.duplicates_by_timeout += 1  # the endpoint took it, but its answer came too late
        else:
            verdict.duplicates_unexplained += 1


def _in_hand(request: Arrival, kill: Kill) -> bool:
    """Return whether the killed worker was busy with a request at its death, or just done with it."""
    return request.worker == kill.worker and kill.at - request.at <= TIMEOUT + 1.0


def samples(published: Iterable[Published], arrivals: Iterable[Arrival], began: float) -> list[Sample]:
    """Return the delay of every notice."""
    first: dict[str, float] = {}
    for arrival in arrivals:
        first[arrival.id] = min(arrival.at, first.get(arrival.id, math.inf))
    return [
        Sample(
            class_of(each.merchant),
            each.kind,
            each.at - began,
            max(0.0, first[each.id] - each.at) if each.id in first else None,
        )
        for each in published
    ]


def lag(published: Iterable[Published], planned: Iterable[Notice], began: float) -> float:
    """Return the longest delay of the shop's own publishing in seconds."""
    due = {notice.id: notice.at for notice in planned}
    return max((each.at - began - due[each.id] for each in published), default=0.0)


def by_class(all_samples: Sequence[Sample]) -> list[Delays]:
    """Return the delays per class of merchant."""
    return [delays(name, [each for each in all_samples if each.merchant_class == name]) for name in CLASSES]


def by_kind(all_samples: Sequence[Sample]) -> list[Delays]:
    """Return the delays per priority, over all merchants and then over the quiet ones alone."""
    quiet = [each for each in all_samples if each.merchant_class == QUIET]
    return [
        *(delays(kind, [each for each in all_samples if each.kind == kind]) for kind in KINDS),
        *(delays(f"{kind}, quiet", [each for each in quiet if each.kind == kind]) for kind in KINDS),
    ]


def delays(group: str, of_group: Sequence[Sample]) -> Delays:
    """Summarise one group."""
    known = sorted(each.delay for each in of_group if each.delay is not None)
    p50, p95, p99, top = (percentile(known, share) for share in (0.5, 0.95, 0.99, 1.0))
    return Delays(group, len(of_group), len(of_group) - len(known), p50, p95, p99, top)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile of sorted values; NaN when there are none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
