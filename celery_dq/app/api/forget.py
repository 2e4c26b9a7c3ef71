"""Remove an unused queue from the list of queues."""

from __future__ import annotations

from celery_dq.app.api.broker import BrokerAccess
from celery_dq.app.api.leaders import Leaders
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.queues import QueueSnapshot, queue_snapshot

__all__ = ["forget_queue"]


def forget_queue(broker: BrokerAccess, queue: str) -> bool:
    """Remove the name of an unused queue from the broker, and return whether it was there.

    A former singleton queue is an ordinary one when it is declared again.

    Raises:
        InvalidRequest: The queue has messages, dead letters or consumers, or a worker leads it.
    """
    with broker.open(queue) as (partitions, client):
        _refuse_used(queue_snapshot(partitions, client, ages=False))
        with broker.audit.change(client, "forgotten", queue) as change:
            change.count = int(broker.withdraw(client, queue))
            try:
                _refuse_used(queue_snapshot(partitions, client, ages=False))
            except InvalidRequest:
                # A message or a consumer has come meanwhile.
                broker.declare(client, queue)
                raise
    Leaders(broker).forget(queue)
    return bool(change.count)


def _refuse_used(found: QueueSnapshot) -> None:
    messages = found.waiting + found.delayed + found.discards + found.held
    consumers = [each.name for each in found.consumers if each.is_alive]
    counts = {"messages": messages, "dead letters": found.dead, "consumers": len(consumers)}
    used = ", ".join(f"{noun}: {count}" for noun, count in counts.items() if count)
    if used:
        raise InvalidRequest(f"{found.name!r} is in use ({used}), and is not forgotten")
