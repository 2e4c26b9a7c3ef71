"""Delivers the messages of singleton queues: only in a leadership term, one message after the other.

The states of a singleton queue in a channel::

    closed ──term begins──▶ open ──term ends──▶ closing ──nothing in flight, all acks sent──▶ closed

Claims bring batches, as for every queue. A :class:`SingletonSubscription` keeps the claimed messages. It puts
the next one into the inbox when its predecessor is over, but only while the term is *firm*
(:class:`celery_dq.protocols.Leaderships`). A worker that itself starts a message only after its predecessor
is over receives several at a time, as many as take a moment, and releases those that may not start. The other
messages wait in flight. They are released

* when the term ends;
* when their predecessor returns to the queue by a requeue, a crash or a retry, because it goes first.

A retry is claimed at once, in the place of the message that it repeats. No message passes it until it is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import redis

from celery_dq.protocols import Leaderships, TermPermit
from celery_dq.transport.in_flight import InFlightMessage
from celery_dq.transport.redis.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.consuming.subscriptions import Subscription
from celery_dq.transport.redis.store.partition import Queue

if TYPE_CHECKING:
    from celery_dq.transport.in_flight import Message
    from celery_dq.transport.redis.consuming.channel_claims import ChannelClaims

#: Maximum number of claimed messages of one singleton queue that wait for their delivery.
MAX_WAITING = 64
#: Seconds of work that may begin while acknowledgements of earlier messages are not confirmed by the broker.
#: If the worker is cut off, work of this length runs again, and at least one message.
UNCONFIRMED_S = 0.01


class SingletonSubscription:
    """One singleton queue on one channel.

    Attributes:
        base: The queue without a fencing token, as it is outside of a term.
        queue: The queue with the fencing token of the present or ending term; None when closed.
        waiting: Claimed messages that are not yet delivered.
        under_way: Delivered messages that are not over, in order. More than one only where the pool starts
            them one after the other.
        unconfirmed: Delivered messages, in order, from the first whose ack the broker has not confirmed.
    """

    def __init__(self, base: Queue) -> None:
        self.base = base
        self.queue: Queue | None = None
        self.key = ""
        self.permit: TermPermit | None = None
        self.subscription: Subscription | None = None
        self.waiting: deque[Message] = deque()
        self.delivered: deque[InFlightMessage] = deque()
        self.unconfirmed: deque[InFlightMessage] = deque()
        #: Whether a message returns to the queue. Its delivered successors return before the next delivery.
        self.out_of_order = False
        self.started_at = 0.0
        self.service_s: float | None = None
        #: Maximum number of delivered messages. It is 1 after a message has returned, because the return of
        #: one message takes all its delivered successors along.
        self.window = 1
        #: Whether a message has come that may be delivered beside those under way.
        self.changed = False

    def is_firm(self) -> bool:
        """Return whether the term of the queue is firm."""
        return self.queue is not None and self.permit is not None and self.permit.is_firm

    def has_changed(self) -> bool:
        """Return whether a message has come or is over since the last look, or none is under way."""
        return (
            self.changed
            or not self.delivered
            or self.delivered[0].done
            or (bool(self.unconfirmed) and self.unconfirmed[0].confirmed)
        )


class SingletonDelivery:
    """The singleton queues that one channel consumes. Used by the consumer thread, between two trips.

    Args:
        identity: Consumer identity of the process, with its in-flight messages.
        leaderships: The leaderships of this worker.
        claims: The claims of the channel.
        clients: Returns a factory of Redis clients for the consumer thread.
        deliver: Called with the next message, to put it into the inbox.
        release: Called with a claimed message that must be released.
        claim_ahead_s: Service time that may be claimed ahead, in seconds.
        in_turn: Returns the maximum number of messages of one queue that the worker takes, to run one after
            the other.
    """

    def __init__(
        self,
        identity: ConsumerIdentity,
        leaderships: Leaderships,
        claims: ChannelClaims,
        clients: Callable[[], Callable[[], redis.Redis]],
        deliver: Callable[[Message], None],
        release: Callable[[Message], None],
        claim_ahead_s: float,
        in_turn: Callable[[], int],
    ) -> None:
        self._identity = identity
        self._leaderships = leaderships
        self._claims = claims
        self._clients = clients
        self._deliver = deliver
        self._release = release
        self._claim_ahead_s = claim_ahead_s
        self._window = in_turn
        self._subscriptions: dict[str, SingletonSubscription] = {}
        #: Delivery tags of messages that are over. Their successors may start.
        self.finished_tags: list[str] = []
        #: Whether a queue is closed, so that the ends of its messages are not added to :attr:`over`.
        self.predecessors_unknown = False
        # Kept after remove(): leadership asks for running messages even after the channel was closed.
        self._bases: dict[str, Queue] = {}

    def add(self, queue: Queue) -> None:
        """Consume *queue* in each leadership term of this process."""
        self._subscriptions[queue.name] = SingletonSubscription(queue)
        self._bases[queue.name] = queue
        self._leaderships.attach_consumer(queue.name, self)
        self.follow_leaderships()

    def remove(self, name: str) -> None:
        """Stop consuming the queue."""
        own = self._subscriptions.get(name)
        if own is not None:
            self._close(own)
            del self._subscriptions[name]

    def __contains__(self, name: object) -> bool:
        return name in self._subscriptions

    def is_busy(self, name: str, token: int) -> bool:
        """Return whether messages of a term are in flight, or acks of it are pending. Thread-safe.

        Args:
            name: Name of the queue.
            token: Fencing token of the term.
        """
        identity, key = self._identity, replace(self._bases[name], token=token).key
        in_flight = identity.in_flight
        if in_flight.pending_acks(key) and (name not in self._subscriptions or not in_flight.has_listener):
            # No connection is left to send the acks, and the next heartbeat is seconds away.
            identity.threads.wake()
        # Messages of an unanswered claim do not count: the fence of the next term releases them.
        # In this order: an ack that is pending is under way a moment later.
        return (
            in_flight.has_any(key)
            or identity.threads.has_acks_under_way(key)
            or identity.in_doubt.has_claim_under_way(key)
        )

    def is_cut_off(self, name: str, token: int) -> bool:
        """Return whether the broker has not answered a heartbeat for a whole lease. Thread-safe.

        Args:
            name: Name of the queue.
            token: Fencing token of the term.
        """
        identity, key = self._identity, replace(self._bases[name], token=token).key
        return identity.in_flight.seconds_since_renewal(key, identity.clock.monotonic()) > identity.lease_s

    # -- called by the consumer thread ----------------------------------------------

    def follow_leaderships(self) -> None:
        """Open and close the queues with their terms, and deliver the next messages. Called often."""
        in_doubt = self._identity.in_doubt
        for name, own in self._subscriptions.items():
            queue = own.queue
            if queue is not None and own.is_firm() and not in_doubt.needs_comparison(own.key):
                # The usual case needs no look-up of the term.
                if own.has_changed():
                    self._deliver_next(own, queue)
                continue
            token = self._leaderships.term_token(name)
            if own.queue is not None and own.queue.token != token:
                self._close(own)
            queue = own.queue
            if queue is None and token:
                queue = replace(own.base, token=token)
            if queue is not None and in_doubt.needs_comparison(queue.key):
                # A claim got no answer. Its messages precede all that a new claim would bring, and only the
                # fence of a new term releases them at once.
                self._leaderships.report_doubt(name, queue.token)
                self._close(own)
            elif queue is not None:
                if own.queue is None:
                    self._open(own, queue)
                if own.queue is not None:
                    self._deliver_next(own, queue)
            if own.queue is None:
                self.predecessors_unknown = True

    def add_message(self, message: Message) -> None:
        """Accept a claimed message."""
        own = self._subscriptions.get(message.queue)
        if own is None or own.queue is None or own.permit is None:
            self._release(message)
        else:
            message.enter_term(own.queue.token, own.permit)
            if message.discard:
                # A discard runs nothing, so it neither waits for its predecessor nor delays its successors.
                self._deliver(message)
                return
            own.waiting.append(message)
            own.changed = True

    # -- internals -------------------------------------------------------------

    def _open(self, own: SingletonSubscription, queue: Queue) -> None:
        known = self._identity.in_flight.known_messages(queue.key)
        if known is None:
            self._claims.thread.wake()
            return
        own.queue, own.key = queue, queue.key
        own.permit = self._leaderships.permit(queue.name, queue.token)
        # Messages that were delivered before a lost connection go on, in the order of their claims. The acks
        # of others may still be pending.
        own.unconfirmed = deque(sorted(known, key=lambda held: int(held.claim)))
        own.delivered = deque(held for held in own.unconfirmed if not held.done)
        own.out_of_order, own.window = False, 1
        own.started_at = self._identity.clock.monotonic()
        self._identity.threads.keep_lease(queue, self._clients)
        own.subscription = self._claims.subscribe(queue, lambda: self._claim_limit(own))

    def _close(self, own: SingletonSubscription) -> None:
        queue, own.queue = own.queue, None
        if queue is not None:
            self._release_waiting(own)
            self._claims.unsubscribe(queue.prefix)
            self._identity.threads.drop_lease(queue)

    def _claim_limit(self, own: SingletonSubscription) -> int:
        """Return how many messages to claim: those that fit the claim-ahead time, and at least one."""
        most = self._claims_that_fit(own)
        # At least half of them at a time, so that each call brings enough messages to pay for itself. This
        # condition comes first, because each turn of the loop asks.
        if len(own.waiting) * 2 > most or not own.is_firm():
            return 0
        # A released message precedes all that a claim would bring now.
        return 0 if self._identity.in_flight.is_releasing(own.key) else most - len(own.waiting)

    def _claims_that_fit(self, own: SingletonSubscription) -> int:
        """Return how many messages fit the claim-ahead time, by the mean service time so far."""
        ahead = 0 if not own.service_s else int(self._claim_ahead_s / max(own.service_s, 1e-6))
        return min(max(ahead, 1), MAX_WAITING)

    def _deliver_next(self, own: SingletonSubscription, queue: Queue) -> None:
        own.changed, in_flight = False, self._identity.in_flight
        self._collect_finished(own)
        may_begin = self._confirm(own, queue)
        under_way, unconfirmed = own.delivered, own.unconfirmed
        if own.out_of_order:
            if under_way:
                return
            # A message that returned precedes all that was claimed after it.
            own.out_of_order = False
            self._release_waiting(own)
        if not own.waiting or own.permit is None or not own.permit.is_firm:
            return
        most = min(self._window(), own.window, self._claims_that_fit(own))
        if len(under_way) * 2 > most:
            return  # at least half of them at a time: each delivery costs a turn of the loop
        waiting = own.waiting
        while waiting and len(under_way) < most and len(unconfirmed) < may_begin:
            if waiting[0].record.due_us and self._waits_for_retry(own, waiting[0]):
                return
            message = waiting.popleft()
            held = in_flight.get(message.delivery_tag)
            if held is None:
                continue
            if under_way:
                held.predecessor = under_way[-1]
            else:
                own.started_at = self._identity.clock.monotonic()
            under_way.append(held)
            unconfirmed.append(held)
            self._deliver(message)

    def _confirm(self, own: SingletonSubscription, queue: Queue) -> int:
        """Remove confirmed messages; return how many may start before the first ack is confirmed."""
        unconfirmed = own.unconfirmed
        while unconfirmed and (unconfirmed[0].confirmed or unconfirmed[0].has_returned):
            held = unconfirmed.popleft()
            if held.dead_letter:  # a delivered message in the worker may wait for its confirmation
                self.finished_tags.append(held.tag)
        # The ack of a later message could overtake a dead letter, so none begins before its confirmation.
        awaits_letter = any(held.is_pending_dead_letter for held in unconfirmed)
        most = 1 if awaits_letter else most_unconfirmed(own.service_s)
        if len(unconfirmed) > most // 2 and unconfirmed[most // 2].done:
            # Sent without waiting for a claim, because the next messages soon need the confirmation.
            self._claims.thread.send_acks_soon(queue.key)
        return most

    def _collect_finished(self, own: SingletonSubscription) -> None:
        """Remove delivered messages that are over, and update the mean service time."""
        over = 0
        while own.delivered and own.delivered[0].done:
            held = own.delivered.popleft()
            self.finished_tags.append(held.tag)
            own.out_of_order = held.will_return or own.out_of_order
            over += 1
        if over:
            now = self._identity.clock.monotonic()
            seen, own.started_at = (now - own.started_at) / over, now
            # The weight is that of single updates, so that one long message does not outweigh many batches.
            past = 0.0 if own.service_s is None else 0.8**over
            own.service_s = past * (own.service_s or 0.0) + (1 - past) * seen
            own.window = 1 if own.out_of_order else min(own.window + over, MAX_WAITING)

    def _waits_for_retry(self, own: SingletonSubscription, message: Message) -> bool:
        """Return whether the next message is a retry that is not due yet, so that all others wait."""
        left_s = message.record.due_us / 1e6 - self._identity.server_clock.wall()
        if left_s > 0 and own.subscription is not None:
            self._claims.turn_at(own.subscription, self._identity.clock.monotonic() + left_s)
        return left_s > 0

    def _release_waiting(self, own: SingletonSubscription) -> None:
        while own.waiting:
            self._release(own.waiting.popleft())


def most_unconfirmed(service_s: float | None) -> int:
    """Return how many messages may begin before the acknowledgement of the first one is confirmed.

    Args:
        service_s: Seconds that a message takes; None before the first one is over.
    """
    return max(int(UNCONFIRMED_S / max(service_s or 1.0, 1e-6)), 1)
