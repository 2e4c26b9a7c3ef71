"""The pages of leaders, and of workers and producers. No worker is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.http import QueryDict

from celery_dq.app.api.api import DQ
from celery_dq.contrib.django.dashboard.views import PageView
from celery_dq.inspector.queues import QueueSnapshot

__all__ = ["LeadersView", "WorkersView"]

#: Queues whose consumers one page shows.
MOST_QUEUES = 500


@dataclass(frozen=True)
class WorkerRow:
    """A process that consumes queues.

    Attributes:
        name: Host, process id and a random part.
        lease_s: Seconds until the first of its leases expires; negative after that.
        held: Number of its in-flight messages.
        queues: Names of the queues.
    """

    name: str
    lease_s: float
    held: int
    queues: tuple[str, ...]


class LeadersView(PageView):
    """The leaders of singleton queues and of other elections."""

    page = "leaders"
    section = "leaders"

    def read(self, dq: DQ, given: QueryDict, *, arguments: bool) -> dict[str, Any]:
        """Read the leaders from the server of the elections."""
        if not dq.options.election and not dq.serves_queues():
            return {"leaders": []}
        return {"leaders": dq.leaders()}


class WorkersView(PageView):
    """The consumers of all queues, and the buffered messages on the disk of this machine."""

    page = "workers"
    section = "workers"

    def read(self, dq: DQ, given: QueryDict, *, arguments: bool) -> dict[str, Any]:
        """Read the leases of the consumers, and the spill log."""
        names = list(dq.queues)
        found: dict[str, WorkerRow] = {}
        for name in names[:MOST_QUEUES] if dq.serves_queues() else ():
            queue = dq.queues[name].snapshot(ages=False)
            for each in queue.consumers if isinstance(queue, QueueSnapshot) else ():
                row = found.get(each.name, WorkerRow(each.name, each.lease_s, 0, ()))
                lease_s = min(row.lease_s, each.lease_s)
                found[each.name] = WorkerRow(each.name, lease_s, row.held + each.held, (*row.queues, name))
        spill = dq.buffer.spill() if dq.buffer.options.folder else None
        return {
            "workers": [found[name] for name in sorted(found)],
            "spill": spill,
            "queues_left_out": max(len(names) - MOST_QUEUES, 0),
            "knows_workers": dq.serves_queues(),
        }
