"""The pages of a queue and of a tenant, and the changes of quotas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.http import QueryDict

from celery_dq.app.api.api import DQ
from celery_dq.contrib.django.dashboard.messages import shown
from celery_dq.contrib.django.dashboard.numbers import exact
from celery_dq.contrib.django.dashboard.queues import QueueRow
from celery_dq.contrib.django.dashboard.views import ChangeView, Confirmation, PageView, required
from celery_dq.errors import InvalidQuota, InvalidRequest
from celery_dq.inspector.live_quotas import spelled_rate
from celery_dq.inspector.queues import ZooKeeperQueueSnapshot
from celery_dq.inspector.tenants import QuotaOrigin, TenantSnapshot
from celery_dq.options import Quota
from celery_dq.transport.tenant import check_tenant

__all__ = ["QueueView", "QuotaRemovalView", "QuotaView", "TenantChange", "TenantView"]

#: Tenants on one page.
TENANTS_PER_PAGE = 50
#: Messages that the pages of a queue and a tenant show.
NEXT_MESSAGES = 20
#: Characters of one part of a quota in the form.
LONGEST_PART = 40


@dataclass(frozen=True)
class TenantRow:
    """A tenant, and where its quota comes from.

    Attributes:
        tenant: The state of the tenant.
        origin: The origin of the quota in force.
    """

    tenant: TenantSnapshot
    origin: QuotaOrigin


class QueueView(PageView):
    """A queue: its figures, a part of its tenants, its next and its delayed messages."""

    page = "queue"

    def read(self, dq: DQ, given: QueryDict, *, arguments: bool) -> dict[str, Any]:
        """Read the queue. The cost does not depend on the number of its tenants above 4,000."""
        name = required(given, "queue")
        queue = dq.queues[name]
        row = QueueRow.of(queue.snapshot())
        data: dict[str, Any] = {
            "row": row,
            "delayed": shown(queue.peek(NEXT_MESSAGES, delayed=True), arguments) if row.queue.delayed else [],
        }
        if isinstance(row.queue, ZooKeeperQueueSnapshot):
            return {**data, "next": shown(queue.peek(NEXT_MESSAGES), arguments)}
        default = dq.quotas.get(name)
        (origin,) = dq.quotas.origins(name, None)
        return {
            **data,
            "queue_pause": row.queue.pause,
            "default": default,
            "default_origin": origin,
            **_tenants(dq, name, given),
        }


def _tenants(dq: DQ, name: str, given: QueryDict) -> dict[str, Any]:
    wanted = given.get("q", "")
    state: Any = given.get("state") or None  # checked below
    part = dq.queues[name].tenant_page(
        given.get("after", ""),
        text_in_name=wanted,
        state=state,
        limit=TENANTS_PER_PAGE,
    )
    found = list(part.tenants)
    if wanted and not given.get("after") and all(each.tenant != wanted for each in found):
        # The tenant of exactly this name is found at once, even if it is idle.
        exact = dq.queues[name].tenant(wanted)
        if exact.state != "idle" or exact.running or dq.quotas.origins(name, wanted)[0].source == "tenant":
            found.insert(0, exact)
    origins = dq.quotas.origins(name, *(each.tenant for each in found))
    return {
        "tenants": [TenantRow(*pair) for pair in zip(found, origins, strict=True)],
        "after": part.after,
        "looked_at": part.looked_at,
    }


class TenantView(PageView):
    """A tenant of a queue: why it waits, its quota, its next messages."""

    page = "tenant"

    def read(self, dq: DQ, given: QueryDict, *, arguments: bool) -> dict[str, Any]:
        """Read the tenant."""
        name, tenant = required(given, "queue"), check_tenant(given.get("tenant", ""))
        queue = dq.queues[name]
        (origin,) = dq.quotas.origins(name, tenant)
        return {
            "queue": name,
            "row": TenantRow(queue.tenant(tenant), origin),
            "is_known": queue.has_tenant(tenant),
            "queue_pause": queue.snapshot(ages=False).pause,
            "explanation": queue.explain(tenant),
            "next": shown(queue.peek(NEXT_MESSAGES, tenant=tenant), arguments),
        }


class TenantChange(ChangeView):
    """A change of one tenant, which shows the tenant afterwards."""

    def back(self, form: QueryDict) -> tuple[str, dict[str, str]]:
        """Return the page of the tenant."""
        return "tenant", {"queue": form.get("queue", ""), "tenant": form.get("tenant", "")}

    def named(self, form: QueryDict) -> tuple[str, str]:
        """Return queue and tenant of the form."""
        return required(form, "queue"), check_tenant(form.get("tenant", ""))


class QuotaView(TenantChange):
    """Gives a tenant a quota of its own, after a preview of the differences."""

    permission = "change_quotas"
    _PARTS = ("rate", "burst", "weight", "concurrency")

    def preview(self, dq: DQ, form: QueryDict) -> Confirmation:
        """Return the parts of the quota before and after."""
        queue, tenant = self.named(form)
        before = dq.quotas.get(queue, tenant)
        after = self._wanted(form, before, f"quota of tenant {tenant!r} in {queue!r}")
        rows = [
            (part, old, new)
            for part in self._PARTS
            if (old := spelled(before, part)) != (new := spelled(after, part))
        ]
        if before.pack() == after.pack():
            raise InvalidRequest(f"the quota of tenant {tenant!r} in {queue!r} has these values already")
        (origin,) = dq.quotas.origins(queue, tenant)
        own = (
            ""
            if origin.source == "tenant"
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
                "seen": before.pack().hex(),
                **{part: form.get(part, "") for part in self._PARTS},
            },
        )

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Set the quota, unless it has changed since the preview."""
        queue, tenant = self.named(form)
        before = dq.quotas.get(queue, tenant)
        seen = before.pack().hex()
        if seen != form.get("seen", seen):
            raise InvalidRequest(
                f"the quota of tenant {tenant!r} in {queue!r} has changed since the preview: it is {before}"
            )
        after = self._wanted(form, before, f"quota of tenant {tenant!r} in {queue!r}")
        parts = {part: getattr(after, part) for part in self._PARTS}
        return f"The quota of tenant {tenant!r} in {queue!r} is {dq.quotas.set(queue, tenant, **parts)} now."

    def _wanted(self, form: QueryDict, base: Quota, where: str) -> Quota:
        given = {part: form.get(part, "").strip() for part in self._PARTS}
        for part, text in given.items():
            if len(text) > LONGEST_PART:
                raise InvalidQuota(f"{where}: {part} = {text[:LONGEST_PART]}…: give a shorter number")
        values: dict[str, object] = {
            "rate": given["rate"] or None,
            "burst": _number(given["burst"] or "1"),
            "weight": _number(given["weight"] or "1"),
            "concurrency": _number(given["concurrency"]) if given["concurrency"] else None,
        }
        if isinstance(values["rate"], str) and values["rate"].replace(".", "", 1).isdecimal():
            values["rate"] = float(values["rate"])
        quota = Quota.parse(values, base=base, where=where)
        if quota.rate is None and quota.burst != 1:
            raise InvalidQuota(
                f"{where}: burst = {quota.burst:g} has no effect without a rate: set a rate, too"
            )
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
    value = spelled_rate(quota.rate) if part == "rate" else getattr(quota, part)
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
        dq.quotas.remove(queue, tenant)
        return f"Tenant {tenant!r} has the default quota of {queue!r}: {dq.quotas.get(queue, tenant)}."
