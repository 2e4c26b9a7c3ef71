"""Calls that carry acks."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from celery_dq.transport.redis.in_flight.in_flight_messages import InFlightMessage, PendingDeadLetter
from celery_dq.transport.redis.store.partition import ReleaseMode, ScriptCall
from celery_dq.transport.redis.store.queue import Queue
from celery_dq.transport.redis.store.replies import DeliveryTag

if TYPE_CHECKING:
    from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity

#: Most settles, finishes or releases in one call.
MAX_ACKS_PER_CALL = 500


def tags(helds: list[InFlightMessage]) -> list[DeliveryTag]:
    """Return the tags of messages, for the scripts."""
    return [DeliveryTag(held.claim, held.id) for held in helds]


def release(
    process: ConsumerIdentity, queue: Queue, mode: str, helds: list[InFlightMessage]
) -> ScriptCall[int]:
    """Return the call that releases *helds* to their places."""
    return queue.partition.release(
        queue.consumer(process.consumer),
        tags(helds),
        mode=cast(ReleaseMode, mode),
        max_deliveries=queue.max_deliveries,
        worker=process.consumer,
    )


def dead_letter(process: ConsumerIdentity, queue: Queue, letter: PendingDeadLetter) -> ScriptCall[str]:
    """Return the call that makes an in-flight message a dead letter."""
    return cast(
        "ScriptCall[str]",
        queue.partition.dead_letter(
            queue.consumer(process.consumer),
            DeliveryTag(letter.message.claim, letter.message.id),
            reason=letter.reason,
            worker=process.consumer,
            record=letter.record,
        ),
    )
