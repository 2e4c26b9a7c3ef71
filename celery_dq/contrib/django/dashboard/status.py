"""The pages of leaders, of workers and producers, and of the audit trail. No worker is asked."""

from __future__ import annotations

from typing import Any

from django.http import QueryDict

from celery_dq.app.api.api import DQ
from celery_dq.contrib.django.dashboard.forms import time_before
from celery_dq.contrib.django.dashboard.views import PageView

#: Queues whose consumers one page shows.
MOST_QUEUES = 500


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
        names, knows_workers = list(dq.queues), dq.serves_queues()
        looked_at = names[:MOST_QUEUES] if knows_workers else []
        return {
            "workers": dq.workers.among(dq.queues.snapshots(*looked_at, ages=False) if looked_at else ()),
            "spill": dq.buffer.spill() if dq.buffer.options.folder else None,
            "queues_left_out": max(len(names) - MOST_QUEUES, 0),
            "knows_workers": knows_workers,
        }


#: Entries that the page shows.
ENTRIES = 200


class AuditView(PageView):
    """The latest changes, by queue and time."""

    page = "audit"
    section = "audit"

    def read(self, dq: DQ, given: QueryDict, *, arguments: bool) -> dict[str, Any]:
        """Read the latest entries; there are none on other brokers."""
        since = time_before("since", given.get("since", ""))
        queue = given.get("queue") or None
        entries = dq.audit(since=since, queue=queue, limit=ENTRIES) if dq.serves_queues() else []
        return {"entries": entries, "most": ENTRIES}

    def refuse_unknown_queue(self, dq: DQ, given: QueryDict) -> None:
        """Refuse no queue: the trail outlives them."""
