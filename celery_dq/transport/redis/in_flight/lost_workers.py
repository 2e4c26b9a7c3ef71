"""Logs which worker was lost, and the fate of its messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from celery_dq.shown import shown_logger
from celery_dq.transport.partition_replies import Reaped
from celery_dq.transport.redis.store.queue import process_of

logger = shown_logger(__name__)

#: Most message ids in one log record.
NAMED = 10


def report_lost_workers(queue: str, lost: Iterable[Reaped]) -> None:
    """Log a record for each worker whose messages of *queue* were reaped."""
    for worker, messages in groupby(sorted(lost), key=lambda each: process_of(each.consumer)):
        found = list(messages)
        back = [each.id for each in found if not each.settled]
        gone = [each.id for each in found if each.settled]
        fates = []
        if back:
            fates.append(f"Its messages run again on other workers: {named_ids(back)}.")
        if gone:
            fates.append(
                f"Acknowledged early and so lost: {named_ids(gone)}. A task with acks_late would run again."
            )
        logger.warning(
            "Worker %s lost its lease on queue %s: it ended, or stood still for longer than dq_lease. %s",
            worker,
            queue,
            " ".join(fates),
            extra={"event": "worker_lost", "queue": queue, "worker": worker, "back": back, "gone": gone},
        )


def named_ids(ids: Sequence[str]) -> str:
    """Return the first of these message ids, and how many more there are."""
    more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
    return ", ".join(ids[:NAMED]) + more
