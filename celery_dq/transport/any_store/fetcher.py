"""Claims messages, sends acks and renews leases for one connection, in a thread of its own.

The lease belongs to the connection, whose consumer name is unique. After an error of the store the connection
ends, because an unanswered claim may have taken messages. Nothing renews its leases then, so that other
consumers get the messages when they expire.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from celery_dq.clock import Clock
from celery_dq.shown import shown_logger
from celery_dq.transport.any_store.queue_store import QueueStore, StoreClient
from celery_dq.transport.in_flight.in_flight_messages import InFlightMessages
from celery_dq.transport.partition_replies import ClaimedEntry, ClaimReply
from celery_dq.transport.partition_store import PartitionStore
from celery_dq.transport.threaded_channel import BindingTable, QueueDirectory
from celery_dq.wake_flag import WakeFlag

__all__ = ["StoreConsumer", "StoreFetcher", "StoreQueue", "StoreSource"]

logger = shown_logger(__name__)

#: Renewals per lease.
RENEWALS_PER_LEASE = 4
#: Most messages in one claim.
LARGEST_CLAIM = 100
#: Maximum seconds that closing waits for the confirmation of all acks.
FLUSH_S = 5.0
#: Seconds until the next claim when messages wait that this consumer may not have yet.
PASSED_OVER_S = 0.1


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


@dataclass(eq=False)
class StoreSource:
    """A queue that a channel consumes, with its claimed messages, each with its delivery tag.

    Attributes:
        target: The queue.
        in_flight: The messages of the connection.
        wake: Begins the next round of the fetcher.
        transient_bindings: Returns exchange and routing key of each binding of a transient queue; None for a
            lasting queue.
        inbox: The messages that were claimed and not delivered.
    """

    target: StoreQueue
    in_flight: InFlightMessages
    wake: Callable[[], None]
    transient_bindings: Callable[[], list[tuple[str, str]] | None]
    inbox: deque[tuple[ClaimedEntry, str]] = field(default_factory=deque)

    @property
    def queue(self) -> str:
        """Name of the queue."""
        return self.target.key

    def look_now(self) -> None:
        """Let the fetcher claim at once."""
        self.wake()

    def declare_again(self, queues: QueueDirectory, bindings: BindingTable) -> None:
        """Declare a transient queue again, which other users have deleted while this process stood still."""
        bound = self.transient_bindings()
        if bound is not None and not queues.exists(self.queue):
            queues.declare(self.queue, transient=True)
            for exchange, routing_key in bound:
                bindings.bind(exchange, self.queue, routing_key, transient=True)

    def close(self) -> None:
        """Release the messages that were not delivered, the youngest first."""
        while self.inbox:
            self.in_flight.release(self.inbox.pop()[1], "unstarted")


@dataclass(frozen=True)
class StoreConsumer:
    """The consumer that one connection is.

    Attributes:
        name: Its name in the leases, unique.
        lease_s: Length of its leases in seconds.
        in_flight: Its messages.
        started_tags: Returns the delivery tags of messages whose start can no longer be prevented.
    """

    name: str
    lease_s: float
    in_flight: InFlightMessages
    started_tags: Callable[[], frozenset[str]]

    @property
    def lease_ms(self) -> int:
        """Length of its leases in milliseconds."""
        return int(self.lease_s * 1000)

    def received(
        self, queue: StoreQueue, reply: ClaimReply, sent_at: float
    ) -> list[tuple[ClaimedEntry, str]]:
        """Record the answer to a claim that was sent at monotonic *sent_at*; return its messages."""
        if reply.lost_up_to is not None:
            self.lost_lease(queue, reply.lost_up_to, sent_at)
        self.in_flight.record_renewal(queue.key, sent_at)
        added = [(entry, self.in_flight.add(queue.key, entry.id, entry.claim)) for entry in reply.entries]
        return [(entry, held.tag) for entry, held in added if held is not None]

    def lost_lease(self, queue: StoreQueue, last_claim: int, sent_at: float) -> None:
        """Drop the messages that have not begun: other consumers may have those of claims up to this one.

        Args:
            queue: The queue.
            last_claim: Number of the last claim before the loss was found.
            sent_at: Monotonic time at which the request was sent that found it.
        """
        had = self.in_flight.count_of(queue.key, last_claim)
        lost = self.in_flight.lose_lease(queue.key, self.started_tags(), last_claim, sent_at)
        if had:
            logger.warning(
                "The lease of worker %s on queue %s had expired: other workers may have its messages. %d "
                "messages that had not begun are dropped here; running tasks go on. The store was away for "
                "longer than dq_lease (%g s), or this machine stood still: a longer dq_lease avoids this.",
                self.name,
                queue.key,
                lost,
                self.lease_s,
                extra={"event": "lease_lost", "queue": queue.key},
            )


class StoreFetcher:
    """The fetcher of one connection.

    Args:
        store: The store.
        consumer: The consumer whose messages it claims.
        clock: Monotonic time for the pace of renewals.
        room: Returns how many messages may be claimed for a source now.
        deliver: Called with a source whose inbox has a message; without one when the connection has failed.
    """

    def __init__(
        self,
        store: QueueStore[Any],
        consumer: StoreConsumer,
        clock: Clock,
        room: Callable[[StoreSource], int],
        deliver: Callable[..., None],
    ) -> None:
        self._store = store
        self._consumer = consumer
        self._clock = clock
        self._room = room
        self._deliver = deliver
        self._sources: list[StoreSource] = []
        #: The queues on which the consumer has a lease.
        self._leased: dict[str, StoreQueue] = {}
        self._renew_at = -math.inf
        #: Delivery tag of the suspect in flight; no other one is claimed beside it.
        self._suspect = ""
        self._waker = WakeFlag()
        #: One flag for each waiting :meth:`flush`.
        self._flushes: deque[WakeFlag] = deque()
        #: The source that got messages last: the one behind it has the next turn.
        self._served: StoreSource | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None
        #: The error that ended the connection.
        self.failure: Exception | None = None

    # -- from other threads --------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._consumer.in_flight.add_listener(self._acks_pending)
        self._thread = threading.Thread(target=self._run, name="dq-store-fetcher", daemon=True)
        self._thread.start()

    def _acks_pending(self) -> None:
        self.wake()

    def wake(self) -> None:
        """Begin the next round now; callable from signal handlers."""
        self._waker.set()

    def add(self, source: StoreSource) -> None:
        """Start to claim messages for a source."""
        self.keep_lease(source.target)
        self._sources = [*self._sources, source]
        self.wake()

    def remove(self, source: StoreSource) -> None:
        """Stop to claim messages for a source."""
        self._sources = [each for each in self._sources if each is not source]

    def keep_lease(self, queue: StoreQueue) -> None:
        """Renew the lease on a queue until the connection ends."""
        self._leased = {**self._leased, queue.key: queue}

    def flush(self) -> None:
        """Wait until the acks are confirmed, or the store does not answer."""
        if self.failure is None and self._thread is not None:
            flushed = WakeFlag()
            self._flushes.append(flushed)
            self.wake()
            flushed.wait(FLUSH_S)
            flushed.close()

    def stop(self) -> None:
        """Send the acks, end the leases on queues without running messages, and end the thread."""
        self._consumer.in_flight.remove_listener(self._acks_pending)
        self._stopping = True
        self.wake()
        if self._thread is not None:
            self._thread.join(FLUSH_S)

    # -- the thread ------------------------------------------------------------------

    def _run(self) -> None:
        client: StoreClient | None = None
        try:
            client = self._store.connect()
            while not self._stopping:
                self._waker.clear()
                flushes = len(self._flushes)
                version = self._store.version(client)
                wait_s = self._round(client)
                if not self._consumer.in_flight.queues_with_acks(self._leased):
                    self._end_flushes(flushes)
                if wait_s > 0:
                    self._wait(client, version, wait_s)
            self._end(client)
        except Exception as error:
            # The worker must be notified of any error, or it would wait for messages forever.
            self.failure = error
            logger.exception(
                "The fetcher of consumer %s failed; the connection ends, and its messages are served again.",
                self._consumer.name,
                extra={"event": "store_fetcher_failed"},
            )
            self._deliver()
        finally:
            self._end_flushes(len(self._flushes))
            self._waker.close()
            if client is not None:
                client.close()

    def _end_flushes(self, count: int) -> None:
        for _ in range(count):
            self._flushes.popleft().set()

    def _wait(self, client: StoreClient, version: object, wait_s: float) -> None:
        """Wait for a wake-up, a change in the store, or the time of the next round."""
        until = self._clock.monotonic() + wait_s
        while self._clock.monotonic() < until and self._store.version(client) == version:
            if self._waker.wait(self._store.look_every_s):
                return

    def _round(self, client: StoreClient) -> float:
        """Send acks, renew leases and claim; return the seconds until the next round is due."""
        # Counted before the acks are sent: a message that is released from now on makes no room for a later
        # one before it is in its place.
        sources = self._sources
        first = sources.index(self._served) + 1 if self._served in sources else 0
        rooms = [(source, self._room(source)) for source in (*sources[first:], *sources[:first])]
        self._send_acks(client)
        wait_s = self._renew(client)
        for source, room in rooms:
            wait_s = min(wait_s, self._claim(source, min(room, self._room(source), LARGEST_CLAIM), client))
        return wait_s

    def _send_acks(self, client: StoreClient) -> None:
        in_flight = self._consumer.in_flight
        for queue, box in in_flight.queues_with_acks(self._leased):
            while box:
                in_flight.send_acks(self._consumer.name, queue, client)

    def _renew(self, client: StoreClient) -> float:
        """Renew all leases, if that is due; return the seconds until it is due again."""
        now = self._clock.monotonic()
        if now >= self._renew_at:
            next_end_s = self._consumer.lease_s / RENEWALS_PER_LEASE
            for queue in tuple(self._leased.values()):
                sent_at = self._clock.monotonic()
                reply = queue.partition.heartbeat(
                    self._consumer.name,
                    lease_ms=self._consumer.lease_ms,
                    max_deliveries=queue.max_deliveries,
                ).run(client)
                if not reply.alive:
                    self._consumer.lost_lease(queue, reply.claim, sent_at)
                    self._declare_again(queue, client)
                self._consumer.in_flight.record_renewal(queue.key, sent_at)
                next_end_s = min(next_end_s, max(reply.next_end_s, 0.0))
            self._renew_at = now + next_end_s
        return self._renew_at - now

    def _declare_again(self, queue: StoreQueue, client: StoreClient) -> None:
        for source in self._sources:
            if source.queue == queue.key:
                source.declare_again(self._store.queues(client), self._store.bindings(client))

    def _claim(self, source: StoreSource, want: int, client: StoreClient) -> float:
        """Claim messages for a source; return the seconds until there may be more."""
        queue, consumer = source.target, self._consumer
        if want <= 0:
            return math.inf
        sent_at = self._clock.monotonic()
        reply = queue.partition.claim(
            consumer.name,
            lease_ms=consumer.lease_ms,
            want=want,
            max_deliveries=queue.max_deliveries,
            suspects=self._suspect not in consumer.in_flight,
        ).run(client)
        claimed = consumer.received(queue, reply, sent_at)
        if reply.lost_up_to is not None:
            self._declare_again(queue, client)
        if reply.suspect and claimed:
            self._suspect = claimed[0][1]
        if claimed:
            self._served = source
        source.inbox.extend(claimed)
        if source not in self._sources:
            source.close()  # it was cancelled while the claim was under way
        if claimed:
            self._deliver(source)
            return 0.0
        next_look_s = math.inf if reply.next_look_s is None else max(reply.next_look_s, 0.0)
        return min(next_look_s, PASSED_OVER_S) if reply.more else next_look_s

    def _end(self, client: StoreClient) -> None:
        self._send_acks(client)
        for queue in self._leased.values():
            # The store would give away what still runs here; the lease of that expires.
            if not self._consumer.in_flight.has_any(queue.key):
                while queue.partition.resign(self._consumer.name).run(client):
                    pass
