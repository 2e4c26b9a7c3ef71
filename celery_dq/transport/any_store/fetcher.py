"""Claims messages, sends acks and renews leases for one connection, in a thread of its own.

The lease belongs to the connection, whose consumer name is unique. After an error of the store the connection
ends, because an unanswered claim may have taken messages. Nothing renews its leases then, so that other
consumers get the messages when they expire.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from celery_dq.clock import Clock
from celery_dq.shown import shown_logger
from celery_dq.transport.any_store.queue_store import QueueStore, StoreClient
from celery_dq.transport.fetcher import FLUSH_S, Fetcher, QueueSubscription
from celery_dq.transport.in_flight import InFlightMessages
from celery_dq.transport.partition_replies import ClaimedEntry, ClaimReply
from celery_dq.transport.partition_store import PartitionStore

__all__ = ["Claimed", "StoreFetcher", "StoreQueue", "StoreSubscription"]

logger = shown_logger(__name__)

#: Renewals per lease.
RENEWALS_PER_LEASE = 4
#: Seconds until the next claim when messages wait that this consumer may not have yet.
PASSED_OVER_S = 0.1

#: A claimed message with its delivery tag.
Claimed = tuple[ClaimedEntry, str]


@dataclass(frozen=True)
class StoreQueue:
    """One queue of a store.

    Attributes:
        key: Its name.
        partition: The calls on it.
        max_deliveries: Lost consumers after which a message is dead; 0 means never.
    """

    key: str
    partition: PartitionStore[Any]
    max_deliveries: int

    def consumer(self, process: str) -> str:
        """Return the name under which a process consumes the queue: its own."""
        return process


class StoreSubscription(QueueSubscription):
    """A queue that a channel consumes.

    Args:
        target: The queue.
        channel: The channel.
        wake: Begins the next round of the fetcher.
    """

    def __init__(self, target: StoreQueue, channel: Any, wake: Callable[[], None]) -> None:
        super().__init__(target.key, channel, wake)
        self.target = target

    def release(self, claimed: Claimed) -> None:
        """Release a message that was not delivered."""
        self.channel.in_flight.release(claimed[1], "unstarted")


class StoreFetcher(Fetcher[StoreSubscription]):
    """The fetcher of one connection, and the consumer that the connection is.

    Args:
        store: The store.
        consumer: The name of the consumer in its leases, unique.
        lease_s: Length of its leases in seconds.
        in_flight: Its messages.
        started_tags: Returns the delivery tags of messages whose start can no longer be prevented.
        clock: Monotonic time for the pace of renewals.
        deliver: Called with a subscription whose inbox has a message; without one when the connection has
            failed.
    """

    name = "dq-store-fetcher"
    _client: StoreClient

    def __init__(
        self,
        store: QueueStore[Any],
        consumer: str,
        lease_s: float,
        in_flight: InFlightMessages,
        started_tags: Callable[[], frozenset[str]],
        clock: Clock,
        deliver: Callable[..., None],
    ) -> None:
        super().__init__(deliver)
        self._store = store
        self._consumer = consumer
        self._lease_s = lease_s
        self._in_flight = in_flight
        self._started_tags = started_tags
        self._clock = clock
        #: The queues on which the consumer has a lease.
        self._leased: dict[str, StoreQueue] = {}
        self._renew_at = -math.inf
        #: Delivery tag of the suspect in flight; no other one is claimed beside it.
        self._suspect = ""
        #: The queue whose acks are under way, and not pending any more.
        self._sending = ""
        #: The version of the store before the last round.
        self._version: object = None

    # -- from other threads --------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._in_flight.add_listener(self.wake)
        super().start()

    def add(self, subscription: StoreSubscription) -> None:
        """Start to claim messages for a subscription."""
        self._keep_lease(subscription.target)
        super().add(subscription)

    def _keep_lease(self, queue: StoreQueue) -> None:
        """Renew the lease on a queue until the connection ends."""
        self._leased = {**self._leased, queue.key: queue}

    def take_one(self, queue: StoreQueue, client: StoreClient) -> list[Claimed]:
        """Claim one message of a queue, in the thread of the caller and over its client."""
        self._keep_lease(queue)
        return self._claim(queue, 1, True, client)[1]

    def stop(self) -> None:
        """Send the acks, end the leases on queues without running messages, and end the thread."""
        self._in_flight.remove_listener(self.wake)
        super().stop()
        if self._thread is not None:
            self._thread.join(FLUSH_S)

    # -- the thread ------------------------------------------------------------------

    @property
    def has_acks(self) -> bool:
        """Whether an ack is pending."""
        return bool(self._in_flight.queues_with_acks(self._leased))

    def has_unconfirmed_acks(self, queue: str) -> bool:
        """Whether a message of a queue has ended, and the store has not confirmed it."""
        box = self._in_flight.pending_acks(queue)
        # Each look is at the next place of an ack.
        return bool(box.moves or box) or self._sending == queue

    def run_rounds(self) -> None:
        """Run rounds until the connection ends; then end the leases."""
        with closing(self._store.connect()) as self._client:
            super().run_rounds()
            self._send_acks()
            for queue in self._leased.values():
                # The store would give away what still runs here; the lease of that expires.
                if not self._in_flight.has_any(queue.key):
                    while queue.partition.resign(self._consumer).run(self._client):
                        pass

    def run_round(self) -> float:
        """Send acks, renew leases and claim; return the seconds until the next round is due."""
        self._version = self._store.version(self._client)
        rooms = self.rooms()
        self._send_acks()
        wait_s = self._renew()
        return min(wait_s, self.claim_all(rooms))

    def wait(self, wait_s: float) -> None:
        """Wait for a wake-up, a change in the store, or the time of the next round."""
        until = self._clock.monotonic() + wait_s
        while self._clock.monotonic() < until and self._store.version(self._client) == self._version:
            if self._waker.wait(self._store.look_every_s):
                return

    def log_failure(self) -> None:
        """Log the present exception."""
        logger.exception(
            "The fetcher of consumer %s failed; the connection ends, and its messages are served again.",
            self._consumer,
            extra={"event": "store_fetcher_failed"},
        )

    def _send_acks(self) -> None:
        for queue, box in self._in_flight.queues_with_acks(self._leased):
            while box:
                self._sending = queue.key
                self._in_flight.send_acks(self._consumer, queue, self._client)
                self._sending = ""

    def _renew(self) -> float:
        """Renew all leases, if that is due; return the seconds until it is due again."""
        now = self._clock.monotonic()
        if now >= self._renew_at:
            next_end_s = self._lease_s / RENEWALS_PER_LEASE
            for queue in tuple(self._leased.values()):
                sent_at = self._clock.monotonic()
                reply = queue.partition.heartbeat(
                    self._consumer, lease_ms=int(self._lease_s * 1000), max_deliveries=queue.max_deliveries
                ).run(self._client)
                if not reply.alive:
                    self._lost_lease(queue, reply.claim, sent_at)
                    self._declare_again(queue)
                self._in_flight.record_renewal(queue.key, sent_at)
                next_end_s = min(next_end_s, max(reply.next_end_s, 0.0))
            self._renew_at = now + next_end_s
        return self._renew_at - now

    def _declare_again(self, queue: StoreQueue) -> None:
        """Declare a transient queue again, which other users have deleted while this process stood still."""
        queues, bindings = self._store.queues(self._client), self._store.bindings(self._client)
        for channel in [each.channel for each in self.subscriptions if each.queue == queue.key]:
            if channel.uses(queue.key) and not queues.exists(queue.key):
                queues.declare(queue.key, transient=True)
                for bound in channel.state.queue_bindings(queue.key):
                    bindings.bind(bound.exchange, queue.key, bound.routing_key, transient=True)

    def claim(self, subscription: StoreSubscription, room: int) -> float:
        """Claim messages for a subscription; return the seconds until there may be more."""
        if room <= 0:
            return math.inf
        queue = subscription.target
        reply, claimed = self._claim(queue, room, self._suspect not in self._in_flight, self._client)
        if reply.lost_up_to is not None:
            self._declare_again(queue)
        if claimed:
            if reply.suspect:
                self._suspect = claimed[0][1]
            subscription.receive(claimed)
            return 0.0
        next_look_s = math.inf if reply.next_look_s is None else max(reply.next_look_s, 0.0)
        return min(next_look_s, PASSED_OVER_S) if reply.more else next_look_s

    def _claim(
        self, queue: StoreQueue, want: int, suspects: bool, client: StoreClient
    ) -> tuple[ClaimReply, list[Claimed]]:
        sent_at = self._clock.monotonic()
        reply = queue.partition.claim(
            self._consumer,
            lease_ms=int(self._lease_s * 1000),
            want=want,
            max_deliveries=queue.max_deliveries,
            suspects=suspects,
        ).run(client)
        if reply.lost_up_to is not None:
            self._lost_lease(queue, reply.lost_up_to, sent_at)
        self._in_flight.record_renewal(queue.key, sent_at)
        added = [(entry, self._in_flight.add(queue.key, entry.id, entry.claim)) for entry in reply.entries]
        return reply, [(entry, held.tag) for entry, held in added if held is not None]

    def _lost_lease(self, queue: StoreQueue, last_claim: int, sent_at: float) -> None:
        """Drop the messages that have not begun: other consumers may have those of claims up to this one.

        Args:
            queue: The queue.
            last_claim: Number of the last claim before the loss was found.
            sent_at: Monotonic time at which the request was sent that found it.
        """
        had = self._in_flight.count_of(queue.key, last_claim)
        lost = self._in_flight.lose_lease(queue.key, self._started_tags(), last_claim, sent_at)
        if had:
            logger.warning(
                "The lease of worker %s on queue %s had expired: other workers may have its messages. %d "
                "messages that had not begun are dropped here; running tasks go on. The store was away for "
                "longer than dq_lease (%g s), or this machine stood still: a longer dq_lease avoids this.",
                self._consumer,
                queue.key,
                lost,
                self._lease_s,
                extra={"event": "lease_lost", "queue": queue.key},
            )
