"""The page of all queues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.http import QueryDict

from celery_dq.app.api.api import DQ
from celery_dq.contrib.django.dashboard.views import PageView
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.queue_counters import WaitingTimes
from celery_dq.inspector.queues import Health, QueueSnapshot, ZooKeeperQueueSnapshot

__all__ = ["QueueRow", "QueuesView", "Waits", "page_number"]

#: Queues on one page. Each takes a few commands, and one more round trip per 100 tenants up to 4,000.
QUEUES_PER_PAGE = 25


@dataclass(frozen=True)
class Waits:
    """Bounds of the waiting times of all claimed messages, in seconds.

    Attributes:
        count: Number of claimed messages.
        p50_s: Half of them waited at most so long; None for none, or for more than an hour.
        p95_s: 95 % of them waited at most so long.
        p99_s: 99 % of them waited at most so long.
    """

    count: int
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None

    @classmethod
    def of(cls, times: WaitingTimes) -> Waits:
        """Return the bounds of a histogram."""
        return cls(times.count, *(times.within_s(part) for part in (0.5, 0.95, 0.99)))


@dataclass(frozen=True)
class QueueRow:
    """A queue with the figures that are derived from its counts.

    Attributes:
        queue: The counts.
        health: The state in one word.
        workers: Number of living consumers; None where the broker does not know them.
        waits: Waiting times of all messages.
        quiet: Those of messages that were alone in line.
        noisy: Those of all others.
    """

    queue: QueueSnapshot | ZooKeeperQueueSnapshot
    health: Health
    workers: int | None
    waits: Waits | None
    quiet: Waits | None
    noisy: Waits | None

    @classmethod
    def of(cls, queue: QueueSnapshot | ZooKeeperQueueSnapshot) -> QueueRow:
        """Return the row of a queue."""
        if isinstance(queue, ZooKeeperQueueSnapshot):
            return cls(queue, queue.health, None, None, None, None)
        quiet, noisy = queue.counters.waits_alone, queue.counters.waits_in_line
        waits = Waits.of(quiet + noisy), Waits.of(quiet), Waits.of(noisy)
        return cls(queue, queue.health, queue.living_consumers, *waits)


def page_number(given: QueryDict) -> int:
    """Return the number of the requested page, from 1.

    Raises:
        InvalidRequest: It is not a number from 1 to 999,999.
    """
    text = given.get("page", "1")
    if not (text.isascii() and text.isdecimal() and len(text) < 7 and int(text)):
        raise InvalidRequest(f"page = {text!r}: give a whole number from 1")
    return int(text)


class QueuesView(PageView):
    """All queues with their messages by reason, waiting times and workers."""

    page = "queues"

    def read(self, dq: DQ, given: QueryDict, *, arguments: bool) -> dict[str, Any]:
        """Read the queues of one page."""
        wanted = given.get("q", "").casefold()
        names = [name for name in dq.queues if wanted in name.casefold()]
        page = page_number(given)
        first = (page - 1) * QUEUES_PER_PAGE
        shown = names[first : first + QUEUES_PER_PAGE]
        return {
            "queues": [QueueRow.of(each) for each in dq.queues.snapshots(*shown)] if shown else [],
            "total": len(names),
            "page_number": page,
            "pages": max(-(-len(names) // QUEUES_PER_PAGE), 1),
        }
