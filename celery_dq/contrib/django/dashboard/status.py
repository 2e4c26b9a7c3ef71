"""The pages of leaders, workers, producers, dedup locks, and of the audit trail. No worker is asked."""

from __future__ import annotations

from typing import Any

from django.http import QueryDict

from celery_dq.app.api.api import DQ
from celery_dq.contrib.django.dashboard.forms import time_before
from celery_dq.contrib.django.dashboard.views import ChangeView, Confirmation, PageView, required

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
    """The consumers of all queues, the rows of the outbox, and the buffered messages on this machine."""

    page = "workers"
    section = "workers"

    def read(self, dq: DQ, given: QueryDict, *, arguments: bool) -> dict[str, Any]:
        """Read the leases of the consumers, the outbox, and the spill log."""
        names, knows_workers = list(dq.queues), dq.serves_queues()
        looked_at = names[:MOST_QUEUES] if knows_workers else []
        return {
            "workers": dq.workers.among(dq.queues.snapshots(*looked_at, ages=False) if looked_at else ()),
            "outboxes": dq.outbox.inspect(),
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


#: Dedup locks that the page shows.
LOCKS = 100


class DedupLocksView(PageView):
    """The dedup locks of one queue, or the queues to choose from."""

    page = "dedup_locks"
    section = "dedup"

    def read(self, dq: DQ, given: QueryDict, *, arguments: bool) -> dict[str, Any]:
        """Read the locks and the verdicts of a queue."""
        if not given.get("queue"):
            names = list(dq.dedup)
            counts = zip(names, dq.dedup.verdicts(*names), strict=True)
            return {"verdicts_by_queue": {name: verdicts for name, verdicts in counts if verdicts}}
        queue = required(given, "queue")
        dedup, key = dq.dedup[queue], given.get("key", "")
        if key:
            found = dedup.inspect(key, tenant=given.get("tenant", ""))
            locks = [] if found is None else [found]
        else:
            locks = dedup.list(LOCKS)
        return {"queue": queue, "locks": locks, "most": LOCKS, "verdicts": dedup.verdicts()}


class ReleaseView(ChangeView):
    """Takes the dedup lock from the head of a key."""

    permission = "release_dedup_locks"
    section = "dedup"
    follows = ("dedup-locks", "queue")

    def preview(self, dq: DQ, form: QueryDict) -> Confirmation:
        """Return the lock."""
        queue, key, tenant = required(form, "queue"), required(form, "key"), form.get("tenant", "")
        found = dq.dedup[queue].inspect(key, tenant=tenant)
        rows = (
            []
            if found is None
            else [(found.head, "runs" if found.running else "waits", found.tail or "none")]
        )
        return Confirmation(
            title="Release the dedup lock?",
            sentence=(
                f"The next call of key {key!r} in {queue!r} may run. A running head is not stopped: "
                "for a while both may run, and the head has the smaller fencing token."
            ),
            button="Release the lock",
            columns=("head", "state", "tail"),
            rows=rows,
            fields={"queue": queue, "key": key, "tenant": tenant},
            is_dangerous=True,
        )

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Release the lock."""
        queue, key = required(form, "queue"), required(form, "key")
        head = dq.dedup[queue].release(key, tenant=form.get("tenant", ""))
        if head is None:
            return f"No call held the dedup lock of key {key!r} in {queue!r}."
        return f"Task {head} does not hold the dedup lock of key {key!r} in {queue!r} any more."
