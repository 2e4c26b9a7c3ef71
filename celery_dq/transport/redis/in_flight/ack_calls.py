"""Acks, releases and dead letters as script calls."""

from __future__ import annotations

from typing import cast

from celery_dq.transport.in_flight.in_flight_message import InFlightMessage, PendingDeadLetter
from celery_dq.transport.in_flight.send_acks import tags
from celery_dq.transport.partition_replies import DeliveryTag, ReleaseMode
from celery_dq.transport.redis.store.queue import Queue
from celery_dq.transport.redis.store.script_calls import ScriptCall


def ack(
    worker: str, queue: Queue, settles: list[InFlightMessage], finishes: list[InFlightMessage]
) -> ScriptCall[int]:
    """Return the call that settles and finishes messages, which *worker* has in flight."""
    return queue.partition.ack(queue.consumer(worker), settle=tags(settles), finish=tags(finishes))


def release(worker: str, queue: Queue, mode: str, helds: list[InFlightMessage]) -> ScriptCall[int]:
    """Return the call that releases *helds*, which *worker* has in flight, to their places."""
    return queue.partition.release(
        queue.consumer(worker),
        tags(helds),
        mode=cast(ReleaseMode, mode),
        max_deliveries=queue.max_deliveries,
        worker=worker,
    )


def dead_letter(worker: str, queue: Queue, letter: PendingDeadLetter) -> ScriptCall[str]:
    """Return the call that makes a message that *worker* has in flight a dead letter."""
    return cast(
        "ScriptCall[str]",
        queue.partition.dead_letter(
            queue.consumer(worker),
            DeliveryTag(letter.message.claim, letter.message.id),
            reason=letter.reason,
            worker=worker,
            record=letter.record,
        ),
    )
