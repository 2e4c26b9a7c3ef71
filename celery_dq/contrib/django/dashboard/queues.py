"""The pages of all queues, of a queue, and of a tenant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.apps import apps
from django.http import QueryDict

from celery_dq.app.api.api import DQ
from celery_dq.contrib.django.dashboard.forms import whole_number
from celery_dq.contrib.django.dashboard.history import Sampler
from celery_dq.contrib.django.dashboard.messages import shown
from celery_dq.contrib.django.dashboard.views import PageView, required
from celery_dq.inspector.queue_counters import WaitingTimes
from celery_dq.inspector.queues import Health, QueueSnapshot, ZooKeeperQueueSnapshot
from celery_dq.inspector.tenants import QuotaOrigin, TenantSnapshot
from celery_dq.transport.resource_set import resources_of
from celery_dq.transport.tenant import check_tenant

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


class QueuesView(PageView):
    """All queues with their messages by reason, waiting times and workers."""

    page = "queues"

    def read(self, dq: DQ, given: QueryDict, *, arguments: bool) -> dict[str, Any]:
        """Read the queues of one page."""
        wanted = given.get("q", "").casefold()
        names = [name for name in dq.queues if wanted in name.casefold()]
        page = whole_number(given, "page", 1)
        first = (page - 1) * QUEUES_PER_PAGE
        shown = names[first : first + QUEUES_PER_PAGE]
        return {
            "queues": [QueueRow.of(each) for each in dq.queues.snapshots(*shown)] if shown else [],
            "total": len(names),
            "page_number": page,
            "pages": max(-(-len(names) // QUEUES_PER_PAGE), 1),
        }


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
