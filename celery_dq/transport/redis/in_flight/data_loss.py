"""Notices that Redis has lost data, from the answers to claims and heartbeats.

The claims of a partition are numbered. While Redis keeps its data, the number never goes back, and no lease
ends before its time.
"""

from __future__ import annotations

from typing import NamedTuple

from celery_dq.shown import shown_logger

logger = shown_logger(__name__)


class _LastAnswer(NamedTuple):
    """The last answer about a partition: the number of its last claim, and two monotonic times."""

    number: int
    sent_at: float
    read_at: float


class DataLoss:
    """The claim numbers that one process has seen.

    Args:
        lease_s: length of a lease in seconds.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._known: dict[str, _LastAnswer] = {}

    def check(
        self, partition: str, number: int, *, lease_lost: bool, sent_at: float, now: float
    ) -> tuple[int, int] | None:
        """Compare an answer with earlier ones.

        Args:
            partition: :attr:`Queue.key` of the queue.
            number: number of the last claim in the answer.
            lease_lost: whether the answer reports that this process had no lease.
            sent_at: monotonic time at which this request was sent.
            now: the monotonic time.

        Returns:
            Old and new claim number when Redis has lost data, else None.
        """
        known = self._known.get(partition)
        if known is not None and sent_at < known.read_at:
            return None  # this request may be older than the one whose answer came first
        self._known[partition] = _LastAnswer(number, sent_at, now)
        if known is None:
            return None
        # Without claims no number can go back, but a lease that ended before its time shows the loss.
        ended_early = lease_lost and now - known.sent_at < self._lease_s
        if number < known.number or (known.number == number == 0 and ended_early):
            return known.number, number
        return None

    def forget(self, partition: str) -> None:
        """Remove a partition whose lease this process has given back."""
        self._known.pop(partition, None)


def report(queue: str, known: int, number: int) -> None:
    """Log the loss of data when the last claim of *queue* was number *known* and is *number* now."""
    if number:
        logger.error(
            "Redis has lost its latest writes to queue %s: its last claim was number %d and is number %d "
            "now. Messages published last may be gone, and messages that were finished may run again. Redis "
            "is a replica that was behind when it took over, or was restored from an older copy: see "
            "min-replicas-to-write and appendfsync.",
            queue,
            known,
            number,
            extra={"event": "writes_lost", "queue": queue},
        )
    else:
        logger.error(
            "Redis has lost all data of queue %s, or all since its first claim: waiting and delayed "
            "messages, dead letters, pauses and quotas set by command may be gone. Tasks that workers have "
            "go on. Publish the others again from their source. Redis was flushed, or restarted without an "
            "append-only file: set appendonly yes; or a replica took over that was behind.",
            queue,
            extra={"event": "data_lost", "queue": queue},
        )
