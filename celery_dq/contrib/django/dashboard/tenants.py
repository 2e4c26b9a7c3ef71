"""The pages of a queue and of a tenant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.apps import apps
from django.http import QueryDict

from celery_dq.app.api.api import DQ
from celery_dq.contrib.django.dashboard.messages import shown
from celery_dq.contrib.django.dashboard.queues import QueueRow
from celery_dq.contrib.django.dashboard.sampler import Sampler
from celery_dq.contrib.django.dashboard.views import PageView, required
from celery_dq.inspector.queues import QueueSnapshot, ZooKeeperQueueSnapshot
from celery_dq.inspector.tenants import QuotaOrigin, TenantSnapshot
from celery_dq.transport.resource_set import resources_of
from celery_dq.transport.tenant import check_tenant

__all__ = ["QueueView", "TenantView"]

#: Tenants on one page.
TENANTS_PER_PAGE = 50
#: Messages that the pages of a queue and a tenant show.
NEXT_MESSAGES = 20


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
            "history": dq.history(name),
            "default": default,
            "default_origin": origin,
            **_tenants(dq, name, given),
        }

    def shown(self, dq: DQ, data: Mapping[str, Any]) -> None:
        """Sample the queue for its history, if it ever had a message."""
        queue = data["row"].queue
        if isinstance(queue, QueueSnapshot) and queue.counters.pushed:
            config: Any = apps.get_app_config("celery_dq")
            sampler: Sampler = config.sampler.get()
            sampler.watch(dq, queue.name)


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
            # A set of resources has no quota and no pause of its own.
            "resources": resources_of(tenant) or (),
            "queue_pause": queue.snapshot(ages=False).pause,
            "explanation": queue.explain(tenant),
            "next": shown(queue.peek(NEXT_MESSAGES, tenant=tenant), arguments),
        }
