"""Claims one message at once, for ``basic_get`` of kombu."""

from __future__ import annotations

import redis

from celery_dq.transport.partition_replies import ClaimedEntry
from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.store.queue import Queue


def claim_one(
    process: ConsumerIdentity, client: redis.Redis, target: Queue
) -> list[tuple[ClaimedEntry, str]]:
    """Claim one message now, as delivered to the caller.

    Args:
        process: Consumer identity of the process.
        client: A client that waits for the answer.
        target: The queue.

    Returns:
        Pairs of message and delivery tag: at most one message, and discards. Empty if none is eligible.

    Raises:
        redis.RedisError: Redis did not answer. The heartbeat thread releases messages of such a claim.
    """
    key = target.key
    while True:
        sent_at = process.clock.monotonic()
        process.in_doubt.claim_sent(key)
        try:
            claimed = target.partition.claim(
                target.consumer(process.consumer),
                lease_ms=process.lease_ms,
                want=1,
                hold=None,
                max_deliveries=target.max_deliveries,
            ).run(client)
        except BaseException:
            process.in_doubt.claim_unanswered(key)
            raise
        taken = []
        for entry, held in process.claimed(target, claimed, sent_at):
            if held is not None:
                held.delivered = True
                taken.append((entry, held.tag))
        process.in_doubt.claim_answered(key, (entry.claim for entry in claimed.entries))
        if taken or not claimed.entries:
            return taken
