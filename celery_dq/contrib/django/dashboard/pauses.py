"""Pause and resume a tenant or a whole queue."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Final

from django.http import QueryDict

from celery_dq.app.api.api import DQ
from celery_dq.contrib.django.dashboard.quotas import TenantChange
from celery_dq.contrib.django.dashboard.views import ChangeView, Confirmation, required
from celery_dq.errors import InvalidRequest

__all__ = ["PauseView", "QueuePauseView", "QueueResumeView", "ResumeView"]

#: The lengths of a pause that the pages offer, by their value in the form; None: until it is resumed.
LENGTHS: Final[Mapping[str, timedelta | None]] = {
    "": None,
    "15m": timedelta(minutes=15),
    "1h": timedelta(hours=1),
    "1d": timedelta(days=1),
}


def _length(form: QueryDict) -> timedelta | None:
    """Return the length of a pause.

    Raises:
        InvalidRequest: The form names a length that the pages do not offer.
    """
    text = form.get("length", "")
    if text not in LENGTHS:
        known = ", ".join(filter(None, LENGTHS))
        raise InvalidRequest(f"length = {text!r}: give {known}, or nothing for a pause without an end")
    return LENGTHS[text]


class PauseView(TenantChange):
    """Pauses a tenant, at once: :class:`ResumeView` undoes it."""

    permission = "pause_tenants"

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Pause the tenant."""
        queue, tenant = self.named(form)
        pause = dq.queues[queue].pause(tenant, until=_length(form))
        end = f" {pause}" if pause.until else ""
        return f"Tenant {tenant!r} is paused in {queue!r}{end}. Its running tasks continue."


class ResumeView(TenantChange):
    """Resumes a tenant, at once."""

    permission = "pause_tenants"

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Resume the tenant."""
        queue, tenant = self.named(form)
        if dq.quotas.resume(queue, tenant).paused:
            return f"Tenant {tenant!r} stays paused in {queue!r}, because its quota has paused = True."
        return f"Tenant {tenant!r} is resumed in {queue!r}."


class QueuePauseView(ChangeView):
    """Pauses a whole queue, after a confirmation."""

    permission = "pause_queues"

    def preview(self, dq: DQ, form: QueryDict) -> Confirmation:
        """Return the messages that would wait."""
        queue, length = required(form, "queue"), _length(form)
        now = dq.queues[queue].snapshot(ages=False)
        end = f"for {form['length']}" if length else "until it is resumed"
        return Confirmation(
            title="Pause the queue?",
            sentence=(
                f"Workers start no message of {queue!r}, of no tenant, {end}. Running tasks continue, and "
                "messages are still accepted."
            ),
            button="Pause the queue",
            columns=("queue", "waiting", "delayed", "held by workers"),
            rows=[(queue, str(now.waiting), str(now.delayed), str(now.held))],
            fields={"queue": queue, "length": form.get("length", "")},
        )

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Pause the queue."""
        queue = required(form, "queue")
        pause = dq.queues[queue].pause(until=_length(form))
        end = f" {pause}" if pause.until else ""
        return f"Queue {queue!r} is paused{end}. Its running tasks continue."

    def back(self, form: QueryDict) -> tuple[str, dict[str, str]]:
        """Return the page of the queue."""
        return "queue", {"queue": form.get("queue", "")}


class QueueResumeView(ChangeView):
    """Resumes a whole queue, at once. Tenants that were paused by themselves stay paused."""

    permission = "pause_queues"

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Resume the queue."""
        queue = required(form, "queue")
        if not dq.queues[queue].resume():
            return f"Queue {queue!r} was not paused."
        return f"Queue {queue!r} is resumed."

    def back(self, form: QueryDict) -> tuple[str, dict[str, str]]:
        """Return the page of the queue."""
        return "queue", {"queue": form.get("queue", "")}
