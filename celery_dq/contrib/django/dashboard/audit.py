"""The page of the audit trail: who changed queues and quotas."""

from __future__ import annotations

from typing import Any

from django.http import QueryDict

from celery_dq.app.api.api import DQ
from celery_dq.contrib.django.dashboard.times import time_before
from celery_dq.contrib.django.dashboard.views import PageView

__all__ = ["AuditView"]

#: Entries that the page shows.
ENTRIES = 200


class AuditView(PageView):
    """The latest changes, by queue and time."""

    page = "audit"
    section = "audit"

    def read(self, dq: DQ, given: QueryDict, *, arguments: bool) -> dict[str, Any]:
        """Read the latest entries; there are none on other brokers."""
        since = time_before("since", given.get("since", ""))
        if not dq.serves_queues():
            return {"entries": [], "most": ENTRIES}
        return {
            "entries": dq.audit(since=since, queue=given.get("queue") or None, limit=ENTRIES),
            "most": ENTRIES,
        }

    def refuse_unknown_queue(self, dq: DQ, given: QueryDict) -> None:
        """Refuse no queue: the trail outlives them."""
