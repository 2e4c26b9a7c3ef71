"""The spread of a tenant that follows from the rate of its quota, as ``spread_above_per_s`` asks for."""

from __future__ import annotations

import math
from typing import Any

from celery_dq.app.api.broker import OpenQueue
from celery_dq.duration import SECOND_US
from celery_dq.keys import quota_field
from celery_dq.options import Quota
from celery_dq.shown import shown_logger

__all__ = ["follows_rate", "log_new_spread", "spread_by_rate"]

logger = shown_logger(__name__)


def spread_by_rate(quota: Quota, above_per_s: int, count: int) -> int:
    """Return the number of partitions for a quota: one for each `above_per_s` of its rate.

    Args:
        quota: The quota; without a rate, the number is 1.
        above_per_s: The setting ``spread_above_per_s``.
        count: Number of partitions of the queue, which bounds it, as burst and concurrency do.
    """
    if quota.rate is None:
        return 1
    bounds = (count, math.floor(quota.burst), quota.concurrency or count)
    # The broker stores the interval, from which a rate is read that may be a little lower.
    return min(-(-SECOND_US // (quota.interval_us * above_per_s)), *bounds)


def follows_rate(opened: OpenQueue, tenant: str, base: Quota, above_per_s: int) -> bool:
    """Return whether a tenant has the spread of its rate; else a user has chosen another one.

    Args:
        opened: The queue.
        tenant: The tenant.
        base: The quota in force for it.
        above_per_s: The setting ``spread_above_per_s``.
    """
    client: Any = opened.client
    if not client.hexists(opened.of(tenant)[0].keys.quotas, quota_field(tenant)):
        return True
    return base.spread == spread_by_rate(base, above_per_s, opened.homes.count)


def log_new_spread(queue: str, tenant: str, before: Quota, after: Quota, above_per_s: int) -> None:
    """Log that the rate of a tenant changes its spread; nothing if it does not."""
    if after.spread != before.spread:
        logger.info(
            "Tenant %r of queue %s gets %d partitions instead of %d: its rate is %s, and "
            "dq_queues[%r]['spread_above_per_s'] is %d.",
            tenant,
            queue,
            after.spread,
            before.spread,
            after.rate_text,
            queue,
            above_per_s,
            extra={"event": "tenant_spread_by_rate", "queue": queue, "tenant": tenant},
        )
