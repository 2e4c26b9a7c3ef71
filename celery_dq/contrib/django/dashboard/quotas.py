"""The changes of a tenant's quota: set, removed, undone; pauses of a tenant and of a whole queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from django.core import signing
from django.http import QueryDict

from celery_dq.app.api.api import DQ
from celery_dq.contrib.django.dashboard.forms import exact
from celery_dq.contrib.django.dashboard.views import ChangeView, Confirmation, required
from celery_dq.errors import InvalidQuota, InvalidRequest
from celery_dq.options import Quota
from celery_dq.transport.tenant import check_tenant

#: Characters of one part of a quota in the form.
LONGEST_PART = 40
#: The parts of a quota in the form.
PARTS = ("rate", "burst", "weight", "concurrency", "max_waiting", "when_full", "spread")
#: Seconds for which a request waits for the moves of a tenant whose spread changes.
MOVE_TIMEOUT_S = 5.0
#: Salt of a signed undo, and the seconds for which it can be used.
UNDO, UNDO_S = "celery_dq.undo", 86_400


class TenantChange(ChangeView):
    """A change of one tenant, which shows the tenant afterwards."""

    follows = ("tenant", "queue", "tenant")

    def named(self, form: QueryDict) -> tuple[str, str]:
        """Return queue and tenant of the form."""
        return required(form, "queue"), check_tenant(form.get("tenant", ""))


@dataclass(frozen=True)
class Undo:
    """The way back from a change of a quota, in a signed text.

    Attributes:
        queue: Name of the queue.
        tenant: Name of the tenant.
        before: The own quota before the change, packed, in hexadecimal; "" for none.
        after: The quota in force after it.
    """

    queue: str
    tenant: str
    before: str
    after: str

    @staticmethod
    def of(queue: str, tenant: str, before: Quota | None, after: Quota) -> str:
        """Return the signed text."""
        own = "" if before is None else packed(before)
        return signing.dumps([queue, tenant, own, packed(after)], salt=UNDO)

    @classmethod
    def read(cls, text: str) -> Undo:
        """Read a signed text.

        Raises:
            InvalidRequest: It is not signed by this dashboard, or older than a day.
        """
        try:
            return cls(*signing.loads(text, salt=UNDO, max_age=UNDO_S))
        except signing.BadSignature:
            raise InvalidRequest(
                "the change is too long ago to be undone here: set the quota instead"
            ) from None


def packed(quota: Quota) -> str:
    """Return a quota in hexadecimal, without its pause, which other forms set and end."""
    return replace(quota, paused=False).pack().hex()


def has_own_quota(dq: DQ, queue: str, tenant: str) -> bool:
    """Whether the quota in force was set for this tenant."""
    return dq.quotas.origins(queue, tenant)[0].source == "tenant"


def set_quota(dq: DQ, queue: str, tenant: str, quota: Quota) -> Quota:
    """Give a tenant a quota of its own, and return the one in force."""
    parts = {part: getattr(quota, part) for part in PARTS}
    return dq.quotas.set(queue, tenant, timeout=MOVE_TIMEOUT_S, **parts)


class QuotaView(TenantChange):
    """Gives a tenant a quota of its own, after a preview of the differences."""

    permission = "change_quotas"

    def preview(self, dq: DQ, form: QueryDict) -> Confirmation:
        """Return the parts of the quota before and after."""
        queue, tenant = self.named(form)
        before = dq.quotas.get(queue, tenant)
        after = self._wanted(form, before, f"quota of tenant {tenant!r} in {queue!r}")
        rows = [
            (part, old, new)
            for part in PARTS
            if (old := spelled(before, part)) != (new := spelled(after, part))
        ]
        if before.pack() == after.pack():
            raise InvalidRequest(f"the quota of tenant {tenant!r} in {queue!r} has these values already")
        own = (
            ""
            if has_own_quota(dq, queue, tenant)
            else " It becomes its own: a later change of the default has no effect."
        )
        now = "changes at once, for its backlog too"
        return Confirmation(
            title="Change the quota?",
            sentence=f"The quota of tenant {tenant!r} in {queue!r} {now}.{own}",
            button="Change the quota",
            columns=("", "now", "then"),
            rows=rows,
            fields={
                "queue": queue,
                "tenant": tenant,
                "seen": packed(before),
                **{part: form.get(part, "") for part in PARTS},
            },
        )

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Set the quota, unless it has changed since the preview."""
        queue, tenant = self.named(form)
        before = dq.quotas.get(queue, tenant)
        seen = packed(before)
        if seen != form.get("seen", seen):
            raise InvalidRequest(
                f"the quota of tenant {tenant!r} in {queue!r} has changed since the preview: it is {before}"
            )
        after = self._wanted(form, before, f"quota of tenant {tenant!r} in {queue!r}")
        was_own = has_own_quota(dq, queue, tenant)
        now = set_quota(dq, queue, tenant, after)
        self.undo = Undo.of(queue, tenant, before if was_own else None, now)
        return f"The quota of tenant {tenant!r} in {queue!r} is {now} now."

    def _wanted(self, form: QueryDict, base: Quota, where: str) -> Quota:
        given = {part: form.get(part, "").strip() for part in PARTS}
        for part, text in given.items():
            if len(text) > LONGEST_PART:
                raise InvalidQuota(f"{where}: {part} = {text[:LONGEST_PART]}…: give a shorter number")
        values: dict[str, object] = {
            "rate": given["rate"] or None,
            "burst": _number(given["burst"] or "1"),
            "weight": _number(given["weight"] or "1"),
            "concurrency": _number(given["concurrency"]) if given["concurrency"] else None,
            "max_waiting": _number(given["max_waiting"]) if given["max_waiting"] else None,
            "when_full": given["when_full"] or "refuse",
            "spread": _number(given["spread"] or "1"),
        }
        if isinstance(values["rate"], str) and values["rate"].replace(".", "", 1).isdecimal():
            values["rate"] = float(values["rate"])
        quota = Quota.parse(values, base=base, where=where)
        if without_effect := quota.without_effect(base):
            raise InvalidQuota(f"{where}: {without_effect}")
        return quota


def _number(text: str) -> int | float | str:
    """Return a number, or the text for the error of the quota."""
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


def spelled(quota: Quota, part: str) -> str:
    """Return a part of a quota as a form has it; "unlimited" for None."""
    value = quota.spelled_rate if part == "rate" else getattr(quota, part)
    return "unlimited" if value is None else exact(value) if isinstance(value, float) else str(value)


class QuotaRemovalView(TenantChange):
    """Removes the quota of a tenant, so that the default holds for it again."""

    permission = "change_quotas"

    def preview(self, dq: DQ, form: QueryDict) -> Confirmation:
        """Return the quota that goes, and the one that follows."""
        queue, tenant = self.named(form)
        return Confirmation(
            title="Remove the quota?",
            sentence=f"The default of {queue!r} holds for tenant {tenant!r} again, at once.",
            button="Remove the quota",
            columns=("now", "then"),
            rows=[(str(dq.quotas.get(queue, tenant)), str(dq.quotas.get(queue)))],
            fields={"queue": queue, "tenant": tenant},
        )

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Remove the quota."""
        queue, tenant = self.named(form)
        before = dq.quotas.get(queue, tenant) if has_own_quota(dq, queue, tenant) else None
        dq.quotas.remove(queue, tenant, timeout=MOVE_TIMEOUT_S)
        now = dq.quotas.get(queue, tenant)
        self.undo = Undo.of(queue, tenant, before, now)
        return f"Tenant {tenant!r} has the default quota of {queue!r}: {now}."


class QuotaUndoView(TenantChange):
    """Undoes a change of a quota, at once, unless the quota has changed again."""

    permission = "change_quotas"

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Bring the quota back."""
        undo = Undo.read(form.get("undo", ""))
        if self.named(form) != (undo.queue, undo.tenant):
            raise InvalidRequest("the change was one of another tenant")
        now = dq.quotas.get(undo.queue, undo.tenant)
        if packed(now) != undo.after:
            raise InvalidRequest(
                f"the quota of tenant {undo.tenant!r} in {undo.queue!r} has changed again: it is {now}"
            )
        if undo.before:
            set_quota(dq, undo.queue, undo.tenant, Quota.unpack(bytes.fromhex(undo.before)))
        else:
            dq.quotas.remove(undo.queue, undo.tenant, timeout=MOVE_TIMEOUT_S)
        back = dq.quotas.get(undo.queue, undo.tenant)
        return f"The change is undone: the quota of tenant {undo.tenant!r} in {undo.queue!r} is {back}."


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


class QueuePauseChange(ChangeView):
    """A pause of a whole queue or its end, which shows the queue afterwards."""

    permission = "pause_queues"
    follows = ("queue", "queue")


class QueuePauseView(QueuePauseChange):
    """Pauses a whole queue, after a confirmation."""

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


class QueueResumeView(QueuePauseChange):
    """Resumes a whole queue, at once. Tenants that were paused by themselves stay paused."""

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Resume the queue."""
        queue = required(form, "queue")
        if not dq.queues[queue].resume():
            return f"Queue {queue!r} was not paused."
        return f"Queue {queue!r} is resumed."
