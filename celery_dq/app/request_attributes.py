"""Default attributes of requests and eager results, for the cases in which no broker sets them.

Without these defaults ``self.request.dq_token`` raises ``AttributeError`` in a task that runs in the caller's
process (``apply``, ``task_always_eager``), and ``self.request.dq_deliveries`` on every first delivery.
"""

from __future__ import annotations

from typing import Any

from celery.app.task import Context
from celery.result import EagerResult

from celery_dq.dedup.machine import Verdict
from celery_dq.protocols import (
    DEDUP_HEADER,
    DELIVERIES_HEADER,
    QUEUE_HEADER,
    RESOURCE_HEADER,
    TOKEN_HEADER,
)
from celery_dq.singleton.guard import Guard
from celery_dq.transport.resource_set import resources_of

__all__ = ["define_attributes"]


def define_attributes() -> None:
    """Give Celery's classes the defaults. Idempotent."""
    # Celery leaves attributes of the class out of request.headers, so that a retry inherits none of these.
    request: Any = Context
    defaults: tuple[tuple[str, Any], ...] = (
        (TOKEN_HEADER, 0),
        (DELIVERIES_HEADER, 0),
        (QUEUE_HEADER, ""),
        (RESOURCE_HEADER, _OnlyResource()),
        (DEDUP_HEADER, None),
    )
    for name, default in defaults:
        setattr(request, name, default)
    request.dq_term_ending = property(_term_ending)
    eager: Any = EagerResult
    # An eager task always runs, whatever its key is.
    eager.verdict = Verdict.ACCEPT
    eager.covering = property(_own_id)


class _OnlyResource:
    """The resource of a message that no set has: its tenant. The header of a message of a set hides this."""

    def __get__(self, request: Any, owner: object = None) -> str:
        """Return the tenant that the caller has named."""
        properties = None if request is None else request.properties
        tenant = str((properties or {}).get("tenant") or "")
        return tenant if resources_of(tenant) is None else ""


def _term_ending(request: Any) -> bool:
    """Return whether the term in which a message of a singleton queue runs is ending."""
    guard, token = Guard.current, request.dq_token
    # A run under a dedup lock has a token, too, but no queue.
    if guard is None or not (token and request.dq_queue):
        return False
    return guard.is_ending(request.dq_queue, token)


def _own_id(result: Any) -> Any:
    """Return the task id: an accepted call is covered by itself."""
    return result.id
