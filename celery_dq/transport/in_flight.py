"""The messages that this process holds under a lease, and their acks that the store does not have yet.

An in-flight message goes through these states::

    held ──settle──▶ settled ──finish──▶ done
      │                                   ▲
      ├──────────────finish───────────────┤
      ├──────────────dead letter──────────┤
      └──────────────release──────────────┘

    held or settled ──requeue, with a pause──▶ done

* *held*: claimed under the process's lease. If the process dies, other workers get it.
* *settled*: acknowledged before its body ran (Celery's default). It is never
  delivered again, but its tenant's slot is taken until it finishes.
* *done*: finished, released, made a dead letter, or requeued by ``Throttled`` with a pause of its tenant.
  The ack is pending until the next call for its partition carries it.

:class:`InFlightMessages` belongs to the process, not to a channel: a broken connection ends its channels,
while running tasks go on, and the next connection sends their acks. Its methods never block and take no
lock, because tasks end in pool threads, in greenlets and in the event loop. The containers are atomic under
the GIL, and an entry is moved by popping it, so that two threads never move the same one.

:class:`PendingAcks` keeps the acks of a partition, and :func:`ack_calls` makes the calls for them. The
consumer thread of Redis sends the calls in its trips; ``InFlightMessages.send_acks`` sends them and waits, at
the end of a process and for other stores. The acks of a call without an answer are restored. An ack that is
sent twice is harmless, because it names its claim.

:class:`Message` is what a consumer receives. It ends by way of its channel's :class:`QoS`, which takes it out
of the prefetch count and records its ack in the ``InFlightMessages`` of the process.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from kombu.utils import json as kombu_json

from celery_dq.clock import Clock
from celery_dq.compat.kombu_messages import json_decoder_is_kombus
from celery_dq.errors import CorruptRecord
from celery_dq.protocols import (
    DEDUP_HEADER,
    DELIVERIES_HEADER,
    QUEUE_HEADER,
    RESOURCE_HEADER,
    TOKEN_HEADER,
    TermPermit,
)
from celery_dq.shown import shown_logger
from celery_dq.transport.bases import KombuMessage, VirtualQoS
from celery_dq.transport.envelope import unpack
from celery_dq.transport.message_record import DedupSection, MessageRecord
from celery_dq.transport.partition_replies import ClaimedEntry, DeliveryTag, ReleaseMode
from celery_dq.transport.partition_store import AckedQueue, PartitionStore, PausingStore, StoreCall

logger = shown_logger(__name__)

C = TypeVar("C")
Q = TypeVar("Q")
_T = TypeVar("_T")

#: Most settles, finishes or releases in one call.
MAX_ACKS_PER_CALL = 500
#: Share of a lease since its last renewal after which no message starts (see ``include/lease.lua``).
TRUSTED_SHARE = 0.6
#: Seconds that a settle may wait for the finish of its message, where the task already runs in another
#: process. A task that ends by then costs one ack less, and those of several tasks travel in one call. The
#: price: if this process is killed meanwhile, tasks that began in these milliseconds run again. Without a
#: wait, so do those of the last fraction of a millisecond.
SETTLE_WAIT_S = 0.002
#: No claim is void, and no loss of a lease was read.
NONE_VOID = (-1, -math.inf)
JSON = "application/json"
#: Seconds between two checks of the confirmation that a message waits for.
CONFIRMATION_LOOK_S = 0.001

_read_json: Callable[[str], Any] = json.JSONDecoder(object_hook=kombu_json.object_hook).decode


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
class PausingRequeue:
    """The mode of a release by ``Throttled``, which also returns a settled message, and pauses its tenant.

    Attributes:
        for_us: time until the end of the pause, µs.
        cause: the cause that is kept with the pause.
        record: the message as stored; the broker has no record of a settled message.
        alone: the message itself waits until then, and its tenant goes on.
    """

    for_us: int
    cause: str
    record: bytes
    alone: bool

    def call(self, partition: PartitionStore[C], consumer: str, held: InFlightMessage) -> StoreCall[C, int]:
        """Return the call, for a partition that can pause tenants."""
        return cast("PausingStore[C]", partition).requeue_and_pause(
            consumer,
            DeliveryTag(held.claim, held.id),
            record=self.record,
            for_us=self.for_us,
            cause=self.cause,
            alone=self.alone,
        )


#: How a message is released.
Release: TypeAlias = ReleaseMode | PausingRequeue


@dataclass(eq=False, slots=True)
class Acks:
    """The acks that one call carries, which are not pending any more.

    Attributes:
        settles, finishes, dead_letters: as in :class:`PendingAcks`.
        releases: the mode and the message of each release.
    """

    settles: list[InFlightMessage] = field(default_factory=list)
    finishes: list[InFlightMessage] = field(default_factory=list)
    releases: list[tuple[Release, InFlightMessage]] = field(default_factory=list)
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
    releases: deque[tuple[Release, InFlightMessage]] = field(default_factory=deque)
    dead_letters: deque[PendingDeadLetter] = field(default_factory=deque)
    #: One element for every release without an answer; several threads count by its length.
    releases_under_way: deque[None] = field(default_factory=deque)
    #: One element for every message that a thread moves from those in flight to these acks.
    moves: deque[None] = field(default_factory=deque)
    #: Approximate monotonic time of the oldest finish.
    oldest_finish_at: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.settles or self.finishes or self.releases or self.dead_letters)

    def messages(self) -> list[InFlightMessage]:
        """Return the messages that have a pending ack."""
        released = [held for _, held in tuple(self.releases)]
        dead = [letter.message for letter in tuple(self.dead_letters)]
        return [*self.settles, *self.finishes, *released, *dead]

    def take(self) -> Acks:
        """Pop settles and finishes, to send them in one call.

        A settle whose message has finished since is dropped: its finish includes it.
        """
        settles = [held for held in _pop(self.settles) if not held.done] if self.settles else []
        return Acks(settles, _pop(self.finishes) if self.finishes else [])

    def take_releases(self) -> Iterator[tuple[Release, list[InFlightMessage]]]:
        """Pop releases; yield the messages of each mode, to send them in one call."""
        releases = _pop(self.releases)
        for mode in dict.fromkeys(mode for mode, _ in releases):
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
            released = (
                mode.call(partition, consumer, helds[0])
                if isinstance(mode, PausingRequeue)  # it is the mode of one message
                else partition.release(
                    consumer, tags(helds), mode=mode, max_deliveries=queue.max_deliveries, worker=worker
                )
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


class InFlightMessages:
    """All in-flight messages of one process on one broker.

    Args:
        clock: its monotonic time decides how long a lease is trusted.
        lease_s: length of the lease in seconds.
        acks_wait: whether each settle may wait for the finish of its message, or for a claim.
    """

    def __init__(self, clock: Clock, lease_s: float, acks_wait: bool = False) -> None:
        self._clock = clock
        self._trusted_s = lease_s * TRUSTED_SHARE
        self._messages: dict[str, InFlightMessage] = {}
        self._pending_acks: dict[str, PendingAcks] = {}
        #: Partitions that have pending acks, or had some. An ack is added before its partition.
        self.with_acks: dict[str, PendingAcks] = {}
        self._renewed: dict[str, float] = {}
        #: By partition: number of the last claim that a lost lease has made void, and the monotonic time at
        #: which that was read.
        self._void_up_to: dict[str, tuple[int, float]] = {}
        self._listeners: list[Callable[[], None]] = []
        self._acks_wait = acks_wait
        #: Settles, finishes and releases that came too late: another worker had the message by then.
        self.stale = 0

    # -- holding ---------------------------------------------------------------

    def add(self, partition: str, message_id: str, claim: str) -> InFlightMessage | None:
        """Add a claimed message, unless its claim is void.

        A claim is void when its answer is read after the loss of its lease was noticed: another worker may
        have the message. It is released, which the broker ignores for a message that was reaped.

        Args:
            partition: :attr:`Queue.key` of its queue.
            message_id: message id.
            claim: claim number.

        Returns:
            The in-flight message, or None when the claim is void.
        """
        tag = delivery_tag(partition, claim, message_id)
        held = self._messages[tag] = InFlightMessage(partition, message_id, claim, tag)
        # Compared last: a loss that another thread notices from now on finds this message here.
        if int(claim) <= self._void_up_to.get(partition, NONE_VOID)[0]:
            self.release(tag, "unstarted")
            return None
        return held

    def __len__(self) -> int:
        return len(self._messages)

    def __contains__(self, tag: str) -> bool:
        return tag in self._messages

    def count_of(self, partition: str, last_claim: int | None = None) -> int:
        """Return the number of in-flight messages of *partition*, of claims up to *last_claim* if given."""
        return len(self.messages_of(partition, last_claim))

    def messages_of(self, partition: str, last_claim: int | None = None) -> list[InFlightMessage]:
        """Return the messages that :meth:`count_of` counts, in the order in which they were claimed."""
        return [
            held
            for held in list(self._messages.values())
            if held.partition == partition and (last_claim is None or int(held.claim) <= last_claim)
        ]

    def has_any(self, partition: str) -> bool:
        """Return whether a message of *partition* is in flight, or its ack is pending."""
        box = self.pending_acks(partition)
        # Each look is at the next place of a message that another thread moves on since the look before.
        return bool(self.count_of(partition) or box.moves or box)

    def tags_by_partition(self) -> dict[str, list[str]]:
        """Return the delivery tags of all in-flight messages, by partition."""
        found: dict[str, list[str]] = {}
        for held in list(self._messages.values()):
            found.setdefault(held.partition, []).append(held.tag)
        return found

    def known_messages(self, partition: str) -> list[InFlightMessage] | None:
        """Return the messages in flight and those whose end is pending.

        Returns:
            The messages; None at a moment at which another thread ends a message.
        """
        box = self.pending_acks(partition)
        # Each look is at the next place, as in `has_any`.
        known = self.messages_of(partition)
        if box.moves:
            return None
        return list(dict.fromkeys([*known, *box.messages()]))

    # -- acks -------------------------------------------------------------------

    def settle(self, tag: str, may_wait: bool = False) -> None:
        """Settle this message: it is never delivered again, and its slot stays taken.

        Args:
            tag: delivery tag.
            may_wait: the broker may learn it up to :data:`SETTLE_WAIT_S` later.
        """
        if (held := self._messages.get(tag)) is not None and not held.settled:
            held.settled, held.runs_outside = True, may_wait
            if may_wait or self._acks_wait:
                held.settle_by = self._clock.monotonic() + SETTLE_WAIT_S
            box = self.pending_acks(held.partition)
            box.settles.append(held)
            self.with_acks[held.partition] = box
            self.notify_listeners()

    def finish(self, tag: str) -> InFlightMessage | None:
        """End this message and free its slot; return it. A second call does nothing, and returns None."""
        if (move := self._begin_move(tag)) is None:
            return None
        held, box = move
        if not box.finishes:
            box.oldest_finish_at = self._clock.monotonic()
        box.finishes.append(held)
        self._end_move(held, box)
        return held

    def release(self, tag: str, mode: Release) -> None:
        """Release this message to its old place.

        Args:
            tag: delivery tag.
            mode: ``unstarted`` (the rate limit gets its permit back), ``requeue``, ``crashed`` (counts
                towards ``max_deliveries``), or one with a pause of the tenant.
        """
        if (move := self._begin_move(tag)) is not None:
            held, box = move
            if held.settled and not isinstance(mode, PausingRequeue):
                # A settled message is never delivered again: a release could only run it twice.
                box.finishes.append(held)
            else:
                box.releases_under_way.append(None)
                box.releases.append((mode, held))
                held.will_return = True
            self._end_move(held, box)

    def is_releasing(self, partition: str) -> bool:
        """Return whether a release of *partition* has no answer: a claim might bring a later message."""
        return bool(self.pending_acks(partition).releases_under_way)

    def confirm_releases(self, partition: str, count: int) -> None:
        """Note the answer to *count* releases, for which a message may wait."""
        self.pending_acks(partition).end_releases(count)
        self.notify_listeners()

    def dead_letter(self, tag: str, reason: str, record: bytes) -> None:
        """Make this message a dead letter, and free its slot."""
        if (move := self._begin_move(tag)) is not None:
            held, box = move
            held.dead_letter = True
            box.dead_letters.append(PendingDeadLetter(held, reason, record))
            self._end_move(held, box)

    def _begin_move(self, tag: str) -> tuple[InFlightMessage, PendingAcks] | None:
        """Pop the message for the calling thread, which adds its ack; None when it is over."""
        if (held := self._messages.get(tag)) is None:
            return None
        box = self.pending_acks(held.partition)
        box.moves.append(None)
        if self._messages.pop(tag, None) is not None:
            return held, box
        box.moves.pop()  # another thread has it
        return None

    def _end_move(self, held: InFlightMessage, box: PendingAcks) -> None:
        box.moves.pop()
        self.with_acks[held.partition] = box
        # Last: a thread that sees this flag looks for the pending ack next.
        held.done = True
        self.notify_listeners()

    def lose_lease(
        self, partition: str, running: frozenset[str], last_claim: int, sent_at: float = -math.inf
    ) -> int:
        """Drop the messages of *partition* that have not begun, because their lease was lost.

        Another worker may already have them, or get a running one; the broker ignores the ack of that one.

        Args:
            partition: :attr:`Queue.key` of the queue.
            running: delivery tags that run or are about to.
            last_claim: messages of claims after this number stay, because they belong to the present lease.
            sent_at: monotonic time at which the request was sent; without it, the answer may be older than
                any other.

        Returns:
            The number of dropped messages.
        """
        void_up_to, read_at = self._void_up_to.get(partition, NONE_VOID)
        # A lower number means an older answer, which another thread has read late, or a broker that has lost
        # data and numbers its claims again.
        void_up_to = max(last_claim, void_up_to) if sent_at < read_at else last_claim
        # Written first: a thread that reads an answer now sees this, or its messages are found below.
        self._void_up_to[partition] = void_up_to, self._clock.monotonic()
        lost = [
            held.tag
            for held in self.messages_of(partition, last_claim)
            if held.tag not in running and not (held.settled or held.delivered)
        ]
        for tag in lost:
            held = self._messages.pop(tag, None)
            if held is not None:
                # The broker has returned it to its place.
                held.will_return, held.done = True, True
        return len(lost)

    def renumbered(self, partition: str) -> None:
        """Note that Redis has lost data, and numbers claims again from a lower number."""
        self._void_up_to.pop(partition, None)

    def get(self, tag: str) -> InFlightMessage | None:
        """Return the in-flight message with this delivery tag, or None."""
        return self._messages.get(tag)

    # -- pending acks -----------------------------------------------------------

    def pending_acks(self, partition: str) -> PendingAcks:
        """Return the pending acks of *partition*."""
        box = self._pending_acks.get(partition)
        if box is None:
            box = self._pending_acks.setdefault(partition, PendingAcks())
        return box

    def queues_with_acks(self, leased: Mapping[str, Q]) -> list[tuple[Q, PendingAcks]]:
        """Return the queues with pending acks, and these.

        Args:
            leased: The queues with a lease, by :attr:`Queue.key`. The acks of others are not sent.
        """
        queues = []
        for name, box in tuple(self.with_acks.items()):
            queue = leased.get(name)
            if queue is None:
                continue
            if not box:
                # Removed before the second look, so that an ack which another thread adds now is not missed.
                self.with_acks.pop(name, None)
                if not box:
                    continue
                self.with_acks[name] = box
            queues.append((queue, box))
        return queues

    def has_acks(self, leased: Container[str]) -> bool:
        """Return whether an ack of these queues is pending; callable from any thread."""
        return any(box and name in leased for name, box in tuple(self.with_acks.items()))

    def pending_messages(self, held: InFlightMessage | None = None) -> set[InFlightMessage]:
        """Return the messages with a pending ack, or only *held* if it has one; callable from any thread."""
        if held is None:
            return {each for box in tuple(self._pending_acks.values()) for each in box.messages()}
        return {held}.intersection(self.pending_acks(held.partition).messages())

    def restore_acks(self, partition: str, acks: Acks) -> None:
        """Make acks pending again whose call got no answer."""
        box = self.pending_acks(partition)
        box.restore(acks)
        self.with_acks[partition] = box

    def send_acks(self, worker: str, queue: AckedQueue[C], client: C) -> None:
        """Send the pending acks of a queue, as :func:`ack_calls` does, and wait for the answers.

        Args:
            worker: the name of the process.
            queue: the queue, in Redis or in another store.
            client: a client that waits for answers. After an error of it, unanswered acks are pending again.
        """
        calls = deque(ack_calls(self.pending_acks(queue.key), worker, queue))
        try:
            while calls:
                call, acks = calls[0]
                answer = call.run(client)
                if not acks.dead_letters:
                    self.stale += answer
                acks.confirm()
                if acks.releases:
                    self.confirm_releases(queue.key, len(acks.releases))
                calls.popleft()
        except BaseException:
            for _, acks in reversed(calls):
                self.restore_acks(queue.key, acks)
            raise

    # -- the lease -------------------------------------------------------------

    def record_renewal(self, partition: str, sent_at: float) -> None:
        """Note the answer to a renewal that was sent at monotonic *sent_at*."""
        if sent_at > self._renewed.get(partition, float("-inf")):
            self._renewed[partition] = sent_at

    def renewed_at(self, partition: str) -> float | None:
        """Return the monotonic time at which the last answered renewal was sent; None before the first."""
        return self._renewed.get(partition)

    def seconds_since_renewal(self, partition: str, now: float) -> float:
        """Return the seconds since the last answered renewal was sent; 0 before the first."""
        sent_at = self._renewed.get(partition)
        return 0.0 if sent_at is None else now - sent_at

    def is_lease_trusted(self, partition: str) -> bool:
        """Return whether the lease is fresh enough to start a message."""
        sent_at = self._renewed.get(partition)
        return sent_at is not None and self._clock.monotonic() - sent_at < self._trusted_s

    def forget_partition(self, partition: str) -> None:
        """Remove a partition that is not consumed any more and has no in-flight message."""
        self._renewed.pop(partition, None)
        self._void_up_to.pop(partition, None)
        self._pending_acks.pop(partition, None)
        self.with_acks.pop(partition, None)

    def abandon_partition(self, partition: str) -> int:
        """Drop all messages of *partition*; return how many were in flight or had a pending ack."""
        box = self.pending_acks(partition)
        held = [held.tag for held in self.messages_of(partition)]
        for tag in held:
            self._messages.pop(tag, None)
        return len(held) + len(box.finishes) + len(box.releases) + len(box.dead_letters)

    # -- senders of the acks ----------------------------------------------------

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call *listener* for each new pending ack, and each answer, from any thread."""
        if listener not in self._listeners:
            self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """Undo :meth:`add_listener`."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    @property
    def has_listener(self) -> bool:
        """Whether a channel will send the pending acks."""
        return bool(self._listeners)

    def notify_listeners(self) -> None:
        """Call the listeners: an ack is new, or the broker has answered acks for which a message may wait."""
        for listener in tuple(self._listeners):
            listener()


class StoredMessage(KombuMessage):
    """A message made of an envelope and a body.

    Args:
        envelope: Packed headers and properties.
        body: Body as published.
        priority: Present priority, which may differ from the published one.
        due_us: When the message was due, in µs since 1970; 0 when it had not to wait.
        returned: Whether the message was delivered before.
        deliveries: Number of workers that were lost with the message so far.
        tag: Delivery tag.
        queue: Name of the queue that the message was taken from.
        channel: Channel that delivers the message.

    Raises:
        CorruptRecord: The envelope cannot be read.
    """

    def __init__(
        self,
        envelope: bytes,
        body: str | bytes,
        *,
        priority: int,
        due_us: int,
        returned: bool,
        deliveries: int,
        tag: str,
        queue: str,
        channel: Any,
    ) -> None:
        headers, properties, content_type, content_encoding = unpack(envelope)
        # A retry inherits this header, and a publisher may have forged it, so each delivery sets it.
        headers.pop(DELIVERIES_HEADER, None)
        #: The ETA of a message that waited for it. The header is removed, because the worker would put the
        #: task into its own timer; :meth:`pass_eta_to` restores it for the task.
        self.eta = shown_eta(headers.get("eta"), due_us) if due_us else None
        if due_us:
            headers["eta"] = None
        info = properties.setdefault("delivery_info", {})
        info.setdefault("exchange", "")
        info.setdefault("routing_key", queue)
        if returned:
            info["redelivered"] = headers["redelivered"] = True
            info["deliveries"] = headers[DELIVERIES_HEADER] = deliveries
        properties["priority"] = priority
        properties["delivery_tag"] = tag
        super().__init__(
            body=body,
            delivery_tag=tag,
            content_type=content_type,
            content_encoding=content_encoding,
            delivery_info=info,
            properties=properties,
            headers=headers,
            postencode="utf-8",
            channel=channel,
        )
        self.queue = queue
        self.deliveries = deliveries

    def dead_letter(self, reason: str) -> None:
        """Move the message to the dead letters with *reason*; a later ack or reject has no effect."""
        raise NotImplementedError

    def pass_eta_to(self, request: Any) -> None:
        """Show the task its ETA in ``self.request``; called when the request goes to the pool."""
        if self.eta is not None:
            request.request_dict["eta"] = self.eta


def shown_eta(published: Any, due_us: int) -> Any:
    """Return the ETA as published, or the due time when that is another one, as after a reschedule."""
    due = datetime.fromtimestamp(due_us / 1e6, timezone.utc)
    with suppress(Exception):  # the header may be anything
        moment = published
        if isinstance(moment, str):
            # Python 3.10 does not read the Z of UTC.
            moment = datetime.fromisoformat(moment[:-1] + "+00:00" if moment.endswith("Z") else moment)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=timezone.utc)
        # ZooKeeper has due times in whole milliseconds.
        if abs(moment - due) <= timedelta(milliseconds=1):
            return published
    return due.isoformat()


class Message(StoredMessage):
    """A message claimed from a partition.

    Attributes:
        record: The stored message as it was claimed.
        prefix: Prefix of the keys of its partition; ``""`` for a message that was got without a consumer.
        deliveries: Number of workers that have died with the message so far.
        discard: Reason why the message must not run (``expired``, ``cancelled``, ``dead:…``), or ``""``.
        started: Whether the task has begun. Before that, the message can be released without an effect.
        settles: Whether the message was settled before its task runs, so that :meth:`ack` does not finish it.
        dead_letter_reason: Reason with which the message became a dead letter, or will if it is rejected;
            ``""`` for none.
        crashed: Whether a requeue counts as a delivery, because a worker was lost.
        token: Fencing token of the term in which the message was claimed from a singleton queue; 0 for other
            queues.
        claimed_at: Monotonic time at which the message came into the inbox.
        permit: The term with this token; None for other queues.
    """

    def __init__(
        self, record: MessageRecord, entry: ClaimedEntry, tag: str, queue: str, channel: Any
    ) -> None:
        super().__init__(
            record.envelope,
            record.body,
            priority=record.priority,
            due_us=record.due_us,
            returned=entry.returned,
            deliveries=entry.deliveries,
            tag=tag,
            queue=queue,
            channel=channel,
        )
        # A retry inherits these headers, and a publisher may have forged them, so each delivery sets them.
        self.headers.pop(TOKEN_HEADER, None)
        self.headers.pop(QUEUE_HEADER, None)
        self.headers.pop(DEDUP_HEADER, None)
        self.headers.pop(RESOURCE_HEADER, None)
        if entry.resource:
            self.headers[RESOURCE_HEADER] = entry.resource
        if record.dedup:
            # The fencing token of this run is larger than that of any earlier run.
            self.headers[TOKEN_HEADER] = int(entry.claim)
            self.headers[DEDUP_HEADER] = DedupSection.unpack(record.dedup).header()
        if record.tenant:
            self.properties["tenant"] = record.tenant
        self.record = record
        self.prefix = ""
        self.message_id = entry.id
        self.discard = entry.reason
        self.started = False
        self.settles = False
        self.crashed = False
        self.dead_letter_reason = ""
        self.token = 0
        self.claimed_at = 0.0
        self.permit: TermPermit | None = None

    def enter_term(self, token: int, permit: TermPermit) -> None:
        """Mark the message as claimed from a singleton queue, in the term with this token."""
        self.token = token
        self.permit = permit
        self.headers[TOKEN_HEADER] = token
        self.headers[QUEUE_HEADER] = self.queue

    def may_deliver(self) -> bool:
        """Return whether no other worker can have the message: its lease and its term, if any, are fresh."""
        held = self.channel.in_flight.get(self.delivery_tag)
        return held is not None and self._is_fresh(held)

    def may_start(self) -> bool:
        """Return whether :meth:`may_deliver` holds and the predecessor on a singleton queue is over."""
        held = self.channel.in_flight.get(self.delivery_tag)
        return held is not None and held.unfinished_predecessor() is None and self._is_fresh(held)

    def predecessor(self) -> InFlightMessage | None:
        """Return the message on a singleton queue that must have ended before this one starts, if any."""
        held = self.channel.in_flight.get(self.delivery_tag)
        return None if held is None else held.unfinished_predecessor()

    def expect_return(self) -> None:
        """Note that a retry or replacement has this message's place: messages claimed after it must wait."""
        held = self.channel.in_flight.get(self.delivery_tag)
        if held is not None:
            held.will_return = True

    def wait_for_confirmation(self) -> None:
        """Block this thread or greenlet until the broker has confirmed a dead letter before the message."""
        while (before := self.predecessor()) and before.is_pending_dead_letter and self.may_deliver():
            time.sleep(CONFIRMATION_LOOK_S)

    def _is_fresh(self, held: InFlightMessage) -> bool:
        if not self.channel.in_flight.is_lease_trusted(held.partition):
            return False
        return self.permit is None or self.permit.is_firm

    def _decode(self) -> Any:
        # The result is that of kombu, which creates a decoder for each body.
        if (
            self.content_type == JSON
            and (self.accept is None or JSON in self.accept)
            and json_decoder_is_kombus()
            and isinstance(self.body, bytes)
        ):
            with contextlib.suppress(Exception):  # kombu has its own errors
                return _read_json(self.body.decode())
        return super()._decode()

    def ack(self, multiple: bool = False) -> None:
        """Finish the message, unless it is settled: then its task finishes it.

        Raises:
            MessageStateError: The message was acknowledged, rejected or requeued before.
        """
        if self.settles:
            if self.acknowledged:
                raise self.MessageStateError(f"Message already acknowledged with state: {self._state}")
            self._state = "ACK"
        else:
            super().ack(multiple=multiple)

    def settle(self, may_wait: bool = False) -> None:
        """Acknowledge the message before its task ends: it is never delivered again, and keeps its slot.

        Args:
            may_wait: the task runs in another process, so the ack may wait a moment for its end.
        """
        self.settles = True
        self.channel.qos.settle(self.delivery_tag, may_wait)

    def release(self, mode: Release) -> None:
        """Release the message to its old place; for the modes see ``InFlightMessages.release``. Idempotent.

        Like :meth:`finish`, it may be called from any thread, and after the channel was closed.
        """
        self.channel.qos.release(self.delivery_tag, mode)

    def dead_letter(self, reason: str) -> None:
        """Move the message to the dead letters with *reason*; a later ack or reject has no effect."""
        self.dead_letter_reason = reason
        self.channel.qos.dead_letter(self, reason)

    def finish(self) -> None:
        """Finish the message after its task, with any outcome: its concurrency slot is free. Idempotent."""
        self.channel.qos.finish(self.delivery_tag)


class SettlingChannel(Protocol):
    """The channel whose deliveries a kombu ``QoS`` counts and acknowledges."""

    @property
    def in_flight(self) -> InFlightMessages:
        """The messages that the process holds."""

    @property
    def context(self) -> Any:
        """The state shared by all channels of the connection."""

    @property
    def do_restore(self) -> bool:
        """Whether kombu gives messages back when the channel ends."""

    def running_tags(self) -> Any:
        """Return the delivery tags of messages that run."""

    def send_acks_now(self, held: InFlightMessage | None = None) -> None:
        """Send the pending acks at once where no message is delivered next, and confirm that of *held*."""

    def requeue_transient(self, message: Any) -> None:
        """Push a message of a transient queue again."""


class QoS(VirtualQoS):
    """Prefetch count and acknowledgements of one channel.

    Acknowledgements may come from any thread, also after the channel was closed. They are recorded in the
    messages in flight, and sent over any connection of the process. Kombu's ``QoS`` would track them itself.
    """

    channel: SettlingChannel

    def can_consume(self) -> bool:
        """Return whether the prefetch count allows one more message."""
        limit = self.prefetch_count
        return not limit or len(self._delivered) < limit

    def can_consume_max_estimate(self) -> int | None:
        """Return how many more messages the prefetch count allows; None without a limit."""
        limit: int = self.prefetch_count
        return max(limit - len(self._delivered), 0) if limit else None

    def append(self, message: Any, delivery_tag: str) -> None:
        """Count a delivered message."""
        self._delivered[delivery_tag] = message

    def counts(self, delivery_tag: str) -> bool:
        """Return whether a delivered message counts."""
        return delivery_tag in self._delivered

    def forget(self, delivery_tag: str) -> None:
        """Remove the message from the prefetch count only; the messages in flight track its ack."""
        self._delivered.pop(delivery_tag, None)

    def release(self, delivery_tag: str, mode: Release) -> None:
        """Release a message to its place; the modes are those of ``InFlightMessages.release``."""
        # Released before it makes room: a fetcher's thread must not claim a later message in between.
        self.channel.in_flight.release(delivery_tag, mode)
        self.forget(delivery_tag)

    def settle(self, delivery_tag: str, may_wait: bool = False) -> None:
        """Settle a message whose task begins; for *may_wait* see ``InFlightMessages.settle``."""
        self._delivered.pop(delivery_tag, None)
        self.channel.in_flight.settle(delivery_tag, may_wait)

    def finish(self, delivery_tag: str) -> None:
        """Finish a message whose task is over, which frees its concurrency slot."""
        self._delivered.pop(delivery_tag, None)
        self.channel.in_flight.finish(delivery_tag)

    def dead_letter(self, message: Message, reason: str) -> None:
        """Move a message to the dead letters with a reason."""
        tag: str = message.delivery_tag
        self.channel.in_flight.dead_letter(tag, reason, message.record.pack())
        self.forget(tag)

    def dead_letter_unreadable(self, queue: str, entry: ClaimedEntry, tag: str, why: CorruptRecord) -> None:
        """Move a stored message that cannot be read to the dead letters."""
        logger.error(
            "Message %s of queue %s was moved to the dead letters: %s.",
            entry.id,
            queue,
            why,
            extra={"event": "unreadable_message_dead_lettered", "queue": queue},
        )
        self.channel.in_flight.dead_letter(tag, f"unreadable: {why}", entry.record)

    def ack(self, delivery_tag: str) -> None:
        """Finish a message that a consumer acknowledges."""
        self._delivered.pop(delivery_tag, None)
        self.channel.send_acks_now(self.channel.in_flight.finish(delivery_tag))

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Reject the message.

        Args:
            delivery_tag: Delivery tag of the message.
            requeue: Whether the message returns to its place in the queue. Otherwise it ends here.
        """
        message, held = self._delivered.get(delivery_tag), self.channel.in_flight.get(delivery_tag)
        if not isinstance(message, Message):
            self.forget(delivery_tag)
            if message is not None and requeue:
                self.channel.requeue_transient(message)
        elif requeue:
            self.release(delivery_tag, "crashed" if message.crashed else "requeue")
        elif message.dead_letter_reason or self.channel.context.options.dead_letter_failures:
            message.dead_letter(message.dead_letter_reason or "rejected")
        else:
            self.forget(delivery_tag)
            self.channel.in_flight.finish(delivery_tag)
        self.channel.send_acks_now(held)

    def restore_unacked(self) -> list[tuple[BaseException, Any]]:
        """Return all unacknowledged messages to their queues, except those whose tasks run.

        Running messages stay here, so that a reject finds them after the channel was closed.
        """
        running = self.channel.running_tags()
        for tag in list(self._delivered):
            if tag in running:
                continue
            message = self._delivered.get(tag)
            if isinstance(message, Message):
                self.channel.in_flight.release(tag, "requeue" if message.started else "unstarted")
            elif message is not None:
                self.channel.requeue_transient(message)
            self.forget(tag)
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """Call :meth:`restore_unacked` once, at channel close or interpreter exit."""
        self._on_collect.cancel()
        if self._delivered.restored:
            return
        self._delivered.restored = True
        if self.restore_at_shutdown and self.channel.do_restore:
            self.restore_unacked()
