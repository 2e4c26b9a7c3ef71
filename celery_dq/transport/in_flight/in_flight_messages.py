"""The in-flight messages of a process, and its acks that the broker does not have yet.

An in-flight message goes through these states::

    held ──settle──▶ settled ──finish──▶ done
      │                                   ▲
      ├──────────────finish───────────────┤
      ├──────────────dead letter──────────┤
      └──────────────release──────────────┘

* *held*: claimed under the process's lease. If the process dies, other workers get it.
* *settled*: acknowledged before its body ran (Celery's default). It is never
  delivered again, but its tenant's slot is taken until it finishes.
* *done*: finished, released, or made a dead letter. The ack is pending until the next call for its partition
  carries it.

The messages belong to the process, not to a channel: a broken connection ends its channels, while running
tasks go on, and the next connection sends their acks. The methods never block and take no lock, because
tasks end in pool threads, in greenlets and in the event loop. The containers are atomic under the GIL, and an
entry is moved by popping it, so that two threads never move the same one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

from celery_dq.clock import Clock
from celery_dq.transport.in_flight.pending_acks import (
    Acks,
    InFlightMessage,
    PendingAcks,
    PendingDeadLetter,
    ack_calls,
    delivery_tag,
)
from celery_dq.transport.partition_store import AckedQueue

C = TypeVar("C")
Q = TypeVar("Q")

#: Share of a lease since its last renewal after which no message starts (see ``include/lease.lua``).
TRUSTED_SHARE = 0.6
#: Seconds that a settle may wait for the finish of its message, where the task already runs in another
#: process. A task that ends by then costs one ack less, and those of several tasks travel in one call. The
#: price: if this process is killed meanwhile, tasks that began in these milliseconds run again. Without a
#: wait, so do those of the last fraction of a millisecond.
SETTLE_WAIT_S = 0.002
#: No claim is void, and no loss of a lease was read.
NONE_VOID = (-1, -math.inf)


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
        known += [*box.finishes, *(held for _, held in tuple(box.releases))]
        known += [letter.message for letter in tuple(box.dead_letters)]
        return list(dict.fromkeys(known))

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

    def finish(self, tag: str) -> None:
        """End this message and free its slot. A second call does nothing."""
        if (move := self._begin_move(tag)) is not None:
            held, box = move
            if not box.finishes:
                box.oldest_finish_at = self._clock.monotonic()
            box.finishes.append(held)
            self._end_move(held, box)

    def release(self, tag: str, mode: str) -> None:
        """Release this message to its old place.

        Args:
            tag: delivery tag.
            mode: ``unstarted`` (the rate limit gets its permit back), ``requeue`` or ``crashed`` (counts
                towards ``max_deliveries``).
        """
        if (move := self._begin_move(tag)) is not None:
            held, box = move
            if held.settled:
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
            if not box:
                # Removed before the second look, so that an ack which another thread adds now is not missed.
                self.with_acks.pop(name, None)
                if not box:
                    continue
                self.with_acks[name] = box
            queue = leased.get(name)
            if queue is not None:
                queues.append((queue, box))
        return queues

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
