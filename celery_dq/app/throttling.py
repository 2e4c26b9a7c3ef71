"""The part of ``Throttled`` that happens in the process of the task, by Celery's signal ``task_retry``.

On a tenant broker the worker requeues the message and pauses the tenant of its partition in one step
(``worker/lifecycle.py``). Before that, the process of the task pauses the tenant in its other partitions, and
any other tenant that the task has named. On all other brokers it sends the task again.
"""

from __future__ import annotations

from typing import Any

from celery import signals
from celery.exceptions import Reject

from celery_dq.app.api.api import dq_of
from celery_dq.app.api.broker import BrokerAccess
from celery_dq.app.api.pauses import extend_pause
from celery_dq.compat.retry_records import keep_retries
from celery_dq.errors import described
from celery_dq.keys import PartitionKeys
from celery_dq.shown import shell_word, shown_logger
from celery_dq.transport.partition_replies import PauseCause
from celery_dq.transport.throttled import Throttled

logger = shown_logger(__name__)


def handle_throttled() -> None:
    """Connect the receiver of Celery's signal. Idempotent."""
    signals.task_retry.connect(_on_task_retry, weak=False, dispatch_uid=__name__)
    keep_retries(_is_kept)


def _is_kept(task: Any, request: Any, reason: Exception, error: Exception) -> bool:
    """Log that the record of a retry has failed; return whether the task was throttled, and runs again."""
    if not isinstance(reason, Throttled) or request.is_eager:
        return False
    logger.error(
        "Task %s[%s] was throttled and runs again, but its state RETRY could not be recorded: %s. Look at "
        "the result backend, and at on_retry of the task.",
        task.name,
        request.id,
        described(error),
        extra={"event": "task_end_not_recorded"},
    )
    return True


def _on_task_retry(sender: Any, request: Any, reason: Any = None, einfo: Any = None, **_: Any) -> None:
    # Celery sends no reason for a task that it cancels, as in a cold shutdown.
    if not isinstance(reason, Throttled):
        return
    if request.is_eager:
        # Celery applies this signature, as that of an ordinary retry.
        if sender.max_retries is None or request.retries < sender.max_retries:
            reason.sig = sender.signature_from_request(request, retries=request.retries + 1)
        return
    keys = PartitionKeys.parse(str((request.properties or {}).get("delivery_tag")))
    if keys is None:
        _send_again(sender, request, reason, einfo)
    else:
        _pause_elsewhere(sender, request, reason, keys.queue)


def _send_again(task: Any, request: Any, throttled: Throttled, einfo: Any) -> None:
    """Send the task again with a countdown, and the same number of retries."""
    again = task.signature_from_request(request, countdown=throttled.retry_after, retries=request.retries)
    try:
        again.apply_async()
    except Exception as error:
        # The worker gets this error instead of the retry, as from Celery's own `retry`. A message with a late
        # ack is still in its queue.
        einfo.exception = Reject(described(error), requeue=bool(task.acks_late))


def _pause_elsewhere(task: Any, request: Any, throttled: Throttled, queue: str) -> None:
    """Pause named tenants, and the tenant of a task that lives in several partitions."""
    tenants = throttled.tenants or (request.dq_resource,)
    cause = PauseCause(throttled.reason, task.name, request.id).pack()
    broker = BrokerAccess(task.app, dq_of(task.app).context)
    try:
        with broker.open(queue) as opened:
            for tenant in tenants:
                if throttled.tenants or len(opened.of(tenant)) > 1:
                    extend_pause(broker, opened, tenant, throttled.remaining_us, cause)
    except Exception as error:
        logger.warning(
            "Task %s[%s] was throttled, and tenant %r of queue %s could not be paused in all partitions: %s. "
            "In the others its tasks still call the service, until one of them is throttled there. Look at "
            "the broker, or pause the tenant: celery dq pause %s --tenant %s",
            task.name,
            request.id,
            ", ".join(tenants),
            queue,
            described(error),
            shell_word(queue),
            shell_word(tenants[0]),
            extra={"event": "throttled_tenant_not_paused", "queue": queue, "tenant": ", ".join(tenants)},
        )
