"""One in-flight message, and the pending acks of one partition."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


def delivery_tag(partition: str, claim: str, message_id: str) -> str:
    """Return the delivery tag of a message, which no other delivery in this process has.

    Claims are numbered in each partition, and a task id may be in several: so the tag names the partition.

    Args:
        partition: :attr:`Queue.key` of the queue.
        claim: Claim number.
        message_id: Message id.
    """
    return f"{partition}/{claim}/{message_id}"


@dataclass(eq=False, slots=True)
class InFlightMessage:
    """One in-flight message.

    Attributes:
        partition: :attr:`Queue.key` of the queue that it was claimed from.
        id: message id.
        claim: claim number.
        tag: delivery tag, made of the three; each delivery of a message has another.
        settled: acknowledged early; the broker has the ack, or it is pending.
        settle_by: monotonic time until which its settle may wait for its finish; 0 when it does not wait.
        done: finished, released or made a dead letter.
        will_return: it will be delivered again, so messages that were claimed after it must wait.
        delivered: a plain kombu consumer has it, so it cannot be released without that consumer's knowledge.
        predecessor: the message that went to the pool before it and must have ended when it starts.
        confirmed: the broker has answered its settle, finish or dead letter: it is not delivered again.
        needs: the message that the broker must have confirmed before this one starts.
        has_lock: it has a dedup key, so another message may wait for its end.
    """

    partition: str
    id: str
    claim: str
    tag: str
    settled: bool = False
    settle_by: float = 0.0
    done: bool = False
    will_return: bool = False
    delivered: bool = False
    predecessor: InFlightMessage | None = None
    confirmed: bool = False
    needs: InFlightMessage | None = None
    has_lock: bool = False

    def unfinished_predecessor(self) -> InFlightMessage | None:
        """Return the nearest earlier message that has not ended for good or is not confirmed.

        Messages between the two that have ended are skipped: one that is cancelled or unreadable never runs.

        Returns:
            The message, or None when this one may start.
        """
        while self.predecessor is not None and self.predecessor.is_over:
            self.predecessor = self.predecessor.predecessor
        return self.predecessor or self.unconfirmed()

    def unconfirmed(self) -> InFlightMessage | None:
        """Return the message of `needs` while the broker has not confirmed it, else None."""
        needs = self.needs  # `predecessor` covers a message that is delivered again
        if needs is not None and (needs.confirmed or needs.will_return):
            self.needs = needs = None
        return needs

    @property
    def is_over(self) -> bool:
        """Whether it has ended for good, as far as this process decides."""
        return self.done and not self.will_return

    @property
    def has_returned(self) -> bool:
        """Whether it was released, lost or retried, so that no ack of it is awaited."""
        return self.done and self.will_return


@dataclass(eq=False, slots=True)
class PendingDeadLetter:
    """A message that becomes a dead letter.

    Attributes:
        message: the message.
        reason: the reason, a word or a short sentence.
        record: the message as stored; the broker has no record of a settled message.
    """

    message: InFlightMessage
    reason: str
    record: bytes


@dataclass(eq=False)
class PendingAcks:
    """The pending acks of one partition, oldest first."""

    settles: deque[InFlightMessage] = field(default_factory=deque)
    finishes: deque[InFlightMessage] = field(default_factory=deque)
    releases: deque[tuple[str, InFlightMessage]] = field(default_factory=deque)
    dead_letters: deque[PendingDeadLetter] = field(default_factory=deque)
    #: One element for every release without an answer; several threads count by its length.
    releases_under_way: deque[None] = field(default_factory=deque)
    #: One element for every message that a thread moves from those in flight to these acks.
    moves: deque[None] = field(default_factory=deque)
    #: Approximate monotonic time of the oldest finish.
    oldest_finish_at: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.settles or self.finishes or self.releases or self.dead_letters)

    def settle_due_at(self) -> float | None:
        """Return the monotonic time at which the oldest settle must be sent; None without one.

        In place of a settle that waits, the finish of its message must be sent by then.
        """
        settles = tuple(self.settles)
        return next((held.settle_by for held in settles if held.settle_by or not held.done), None)
