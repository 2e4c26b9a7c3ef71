"""The calls that tell the broker what a process has done with messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from celery_dq.transport.redis.ledger import Burial, Held
from celery_dq.transport.redis.partition import Call, ReleaseMode
from celery_dq.transport.redis.queue import Queue
from celery_dq.transport.redis.replies import Tag

if TYPE_CHECKING:
    from celery_dq.transport.redis.process import Process

#: How many settles, finishes or releases one call carries at most.
TELL_LIMIT = 500


def tags(helds: list[Held]) -> list[Tag]:
    """Return what the scripts want to know of held messages."""
    return [Tag(held.claim, held.id) for held in helds]


def release(process: Process, queue: Queue, mode: str, helds: list[Held]) -> Call[int]:
    """Return the call that gives *helds* back to their place."""
    return queue.partition.release(
        queue.consumer(process.consumer),
        tags(helds),
        mode=cast(ReleaseMode, mode),
        max_deliveries=queue.max_deliveries,
        worker=process.consumer,
    )


def bury(process: Process, queue: Queue, burial: Burial) -> Call[str]:
    """Return the call that makes a dead letter of a held message."""
    return cast(
        "Call[str]",
        queue.partition.dead_letter(
            queue.consumer(process.consumer),
            Tag(burial.held.claim, burial.held.id),
            reason=burial.reason,
            worker=process.consumer,
            record=burial.record,
        ),
    )
