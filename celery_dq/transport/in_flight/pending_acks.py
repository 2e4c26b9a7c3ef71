"""One in-flight message, the acks of a partition that the store does not have yet, and the calls for them.

``InFlightMessages`` adds each ack. The script pipeline of Redis sends the calls without waiting for answers;
``InFlightMessages.send_acks`` sends them and waits, for the heartbeat of Redis and for other stores. The acks
of a call without an answer are restored. An ack that is sent twice is harmless, because it names its claim.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from celery_dq.transport.partition_replies import DeliveryTag, ReleaseMode
from celery_dq.transport.partition_store import AckedQueue, StoreCall

C = TypeVar("C")
_T = TypeVar("_T")

#: Most settles, finishes or releases in one call.
MAX_ACKS_PER_CALL = 500


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
        runs_outside: its task runs in another process, and may have begun long before its settle.
        done: finished, released or made a dead letter.
        dead_letter: made a dead letter, by a call of its own, which the acks of later messages may overtake.
        will_return: it will be delivered again, so messages that were claimed after it must wait.
        delivered: a plain kombu consumer has it, so it cannot be released without that consumer's knowledge.
        predecessor: the message that went to the pool before it and must have ended when it starts.
        confirmed: the broker has answered its settle, finish or dead letter: it is not delivered again.
        has_lock: it has a dedup key, so another message may wait for its end.
    """

    partition: str
    id: str
    claim: str
    tag: str
    settled: bool = False
    settle_by: float = 0.0
    runs_outside: bool = False
    done: bool = False
    dead_letter: bool = False
    will_return: bool = False
    delivered: bool = False
    predecessor: InFlightMessage | None = None
    confirmed: bool = False
    has_lock: bool = False

    def unfinished_predecessor(self) -> InFlightMessage | None:
        """Return the nearest earlier message that has not ended for good.

        Messages between the two that have ended are skipped: one that is cancelled or unreadable never runs.

        Returns:
            The message, or None when this one may start.
        """
        while self.predecessor is not None and self.predecessor.is_over:
            self.predecessor = self.predecessor.predecessor
        return self.predecessor

    @property
    def is_over(self) -> bool:
        """Whether it has ended for good, and no ack of a later message can overtake its own."""
        return self.done and not self.will_return and not self.is_pending_dead_letter

    @property
    def is_pending_dead_letter(self) -> bool:
        """Whether it became a dead letter and runs again if this process is killed now."""
        return self.done and self.dead_letter and not self.confirmed

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


@dataclass(eq=False, slots=True)
class Acks:
    """The acks that one call carries, which are not pending any more.

    Attributes:
        settles, finishes, dead_letters: as in :class:`PendingAcks`.
        releases: the mode and the message of each release.
    """

    settles: list[InFlightMessage] = field(default_factory=list)
    finishes: list[InFlightMessage] = field(default_factory=list)
    releases: list[tuple[str, InFlightMessage]] = field(default_factory=list)
    dead_letters: list[PendingDeadLetter] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.settles or self.finishes or self.releases or self.dead_letters)

    def tags(self) -> dict[str, list[DeliveryTag]]:
        """Return the tags to settle and to finish, as arguments of a claim or an ack."""
        return {
            "settle": tags(self.settles) if self.settles else [],
            "finish": tags(self.finishes) if self.finishes else [],
        }

    def confirm(self) -> None:
        """Note the answer to the call: these messages are not delivered again, except the released ones."""
        for held in self.settles:
            held.confirmed = True
        for held in self.finishes:
            held.confirmed = True
        for letter in self.dead_letters:
            letter.message.confirmed = True


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

    def take(self) -> Acks:
        """Pop settles and finishes, to send them in one call.

        A settle whose message has finished since is dropped: its finish includes it.
        """
        settles = [held for held in _pop(self.settles) if not held.done] if self.settles else []
        return Acks(settles, _pop(self.finishes) if self.finishes else [])

    def take_releases(self) -> Iterator[tuple[str, list[InFlightMessage]]]:
        """Pop releases; yield the messages of each mode, to send them in one call."""
        releases = _pop(self.releases)
        for mode in sorted({mode for mode, _ in releases}):
            yield mode, [held for how, held in releases if how == mode]

    def take_dead_letters(self) -> Iterator[PendingDeadLetter]:
        """Pop the dead letters, each for a call of its own."""
        while letters := _pop(self.dead_letters, 1):
            yield from letters

    def end_releases(self, count: int) -> None:
        """Note the answer to *count* releases."""
        _pop(self.releases_under_way, count)

    def restore(self, acks: Acks) -> None:
        """Make acks pending again whose call got no answer."""
        self.settles.extendleft(reversed(acks.settles))
        self.finishes.extendleft(reversed(acks.finishes))
        self.releases.extendleft(reversed(acks.releases))
        self.dead_letters.extendleft(reversed(acks.dead_letters))


def _pop(queue: deque[_T], limit: int = MAX_ACKS_PER_CALL) -> list[_T]:
    """Pop up to *limit* items; another thread may be popping too."""
    popped: list[_T] = []
    with contextlib.suppress(IndexError):
        while len(popped) < limit:
            popped.append(queue.popleft())
    return popped


def tags(helds: list[InFlightMessage]) -> list[DeliveryTag]:
    """Return the tags of messages, for the scripts."""
    return [DeliveryTag(held.claim, held.id) for held in helds]


def ack_calls(
    pending: PendingAcks, worker: str, queue: AckedQueue[C]
) -> list[tuple[StoreCall[C, Any], Acks]]:
    """Return calls that carry the pending acks of a queue, up to :data:`MAX_ACKS_PER_CALL` of a kind.

    Args:
        pending: the pending acks, which are taken from there.
        worker: the name of the process that has the messages in flight.
        queue: the queue, in Redis or in another store.

    Returns:
        Each call, which is not sent, with its acks. The answer to a call with a dead letter is a word, and
        that to any other call is the number of stale tags.
    """
    partition, consumer = queue.partition, queue.consumer(worker)
    calls: list[tuple[StoreCall[C, Any], Acks]] = []
    acks = pending.take()
    if acks.settles or acks.finishes:
        calls.append((partition.ack(consumer, **acks.tags()), acks))
    if pending.releases:
        for mode, helds in pending.take_releases():
            released = partition.release(
                consumer,
                tags(helds),
                mode=cast(ReleaseMode, mode),
                max_deliveries=queue.max_deliveries,
                worker=worker,
            )
            calls.append((released, Acks(releases=[(mode, held) for held in helds])))
    if pending.dead_letters:
        for letter in pending.take_dead_letters():
            (tag,) = tags([letter.message])
            dead = partition.dead_letter(
                consumer, tag, reason=letter.reason, worker=worker, record=letter.record
            )
            calls.append((dead, Acks(dead_letters=[letter])))
    return calls
