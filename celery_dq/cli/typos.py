"""Checks of names on the command line, so that a typo is an error with a suggestion."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from celery_dq.app.api.api import DQ
from celery_dq.errors import InvalidRequest

__all__ = ["nearest", "queue_and_partition", "require_queue", "unknown_tenant"]

#: Number of tenants with a backlog that are compared with an unknown name.
MOST_TENANTS = 10_000


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a question with the nearest known name, for the end of a text; "" when none is close."""
    close = get_close_matches(name, [*known], 1)
    return f" Did you mean {close[0]!r}?" if close else ""


def require_queue(name: str, known: Iterable[str]) -> None:
    """Check that a queue exists.

    Args:
        name: Name of the queue.
        known: Names of the queues that the app declares or the broker has.

    Raises:
        InvalidRequest: The queue does not exist.
    """
    names = sorted(known)
    if name not in names:
        listed = f" Known queues: {', '.join(map(repr, names[:10]))}{', …' if len(names) > 10 else ''}."
        raise InvalidRequest(f"There is no queue {name!r}.{nearest(name, names) or listed}")


def queue_and_partition(name: str, known: Iterable[str]) -> tuple[str, int | None]:
    """Return a queue and the number of its partition for a name such as ``push/3``; None for a whole queue.

    Raises:
        InvalidRequest: The queue does not exist.
    """
    names = list(known)
    whole, _, number = name.rpartition("/")
    if name not in names and whole in names and number.isdecimal():
        return whole, int(number)
    require_queue(name, names)
    return name, None


def unknown_tenant(dq: DQ, queue: str, tenant: str) -> str:
    """Return an error text for a tenant without messages and quota in a queue; "" for a known tenant."""
    if dq.queues[queue].has_tenant(tenant):
        return ""
    known = {each.tenant for each in dq.queues[queue].tenants(MOST_TENANTS)} | {*dq.quotas.list(queue)}
    return f"Tenant {tenant!r} has no message in {queue!r} and no quota of its own.{nearest(tenant, known)}"
