"""The blocking loop that sends pending acks to a store, and waits for its answers."""

from __future__ import annotations

from typing import TypeVar, cast

from celery_dq.transport.in_flight.in_flight_message import InFlightMessage, PendingDeadLetter
from celery_dq.transport.in_flight.in_flight_messages import InFlightMessages
from celery_dq.transport.partition_replies import DeliveryTag, ReleaseMode
from celery_dq.transport.partition_store import AckedQueue

C = TypeVar("C")

#: Most settles, finishes or releases in one call.
MAX_ACKS_PER_CALL = 500


def tags(helds: list[InFlightMessage]) -> list[DeliveryTag]:
    """Return the tags of messages, for the scripts."""
    return [DeliveryTag(held.claim, held.id) for held in helds]


def send_acks(in_flight: InFlightMessages, worker: str, queue: AckedQueue[C], client: C) -> None:
    """Send the pending acks of a queue, up to :data:`MAX_ACKS_PER_CALL` of a kind, and wait for the answers.

    Args:
        in_flight: the in-flight messages with their acks.
        worker: the name of the process.
        queue: the queue, in Redis or in another store.
        client: a client that waits for answers. After an error of it, unanswered acks are pending again.
    """
    name, partition, consumer = queue.key, queue.partition, queue.consumer(worker)
    settles, finishes = in_flight.take_acks(name, MAX_ACKS_PER_CALL)
    releases = in_flight.take_releases(name, MAX_ACKS_PER_CALL)
    letters: list[PendingDeadLetter] = []
    try:
        if settles or finishes:
            call = partition.ack(consumer, settle=tags(settles), finish=tags(finishes))
            in_flight.stale += call.run(client)
            in_flight.confirm((*settles, *finishes))
            settles, finishes = [], []
        while releases:
            mode = releases[0][0]
            same = [held for how, held in releases if how == mode]
            call = partition.release(
                consumer,
                tags(same),
                mode=cast(ReleaseMode, mode),
                max_deliveries=queue.max_deliveries,
                worker=worker,
            )
            in_flight.stale += call.run(client)
            in_flight.confirm_releases(name, len(same))
            releases = [(how, held) for how, held in releases if how != mode]
        while (letter := in_flight.take_dead_letter(name)) is not None:
            letters = [letter]
            (tag,) = tags([letter.message])
            partition.dead_letter(
                consumer, tag, reason=letter.reason, worker=worker, record=letter.record
            ).run(client)
            in_flight.confirm([letter.message])
            letters = []
    except BaseException:
        in_flight.restore_acks(name, settles, finishes, releases, letters)
        raise
