"""Releases the messages of claims whose answer was lost."""

from __future__ import annotations

import logging
import struct

import redis

from celery_dq.transport.redis.in_flight.ack_calls import MAX_ACKS_PER_CALL
from celery_dq.transport.redis.in_flight.lease_holder import LeaseHolder
from celery_dq.transport.redis.store.queue import Queue
from celery_dq.transport.redis.store.replies import DeliveryTag

logger = logging.getLogger(__name__)

#: The first bytes of an entry of an in-flight hash.
CLAIM_NUMBER = struct.Struct(">d")
#: Approximate number of messages per scan.
FIELDS_PER_SCAN = 200


def release_unknown_claims(process: LeaseHolder, queue: Queue, client: redis.Redis) -> None:
    """Release the messages that the broker has for this process, and that the process does not know."""
    name = queue.key
    fields = client.hscan_iter(
        queue.partition.keys.held(queue.consumer(process.consumer)), count=FIELDS_PER_SCAN
    )
    held = [(f"{CLAIM_NUMBER.unpack_from(value)[0]:.0f}", key.decode()) for key, value in fields]
    strangers = [
        DeliveryTag(*each) for each in process.in_doubt.find_unknown(name, held, process.in_flight.get)
    ]
    for start in range(0, len(strangers), MAX_ACKS_PER_CALL):
        chunk = strangers[start : start + MAX_ACKS_PER_CALL]
        consumer = queue.consumer(process.consumer)
        queue.partition.release(consumer, chunk, mode="unstarted").run(client)
    if strangers:
        logger.info(
            "Worker %s released %d messages of queue %s: the answer to their claim was lost.",
            process.consumer,
            len(strangers),
            queue.name,
            extra={"event": "unanswered_claim_released", "queue": queue.name},
        )
