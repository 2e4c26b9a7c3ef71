"""The thread that claims messages and sends acks for one connection, and the queues that it claims from.

The fetcher waits for the broker, so that a worker's event loop never does. It puts claimed messages into the
inbox of their subscription. The thread that drains the connection, or its event loop, delivers them from
there.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from celery_dq.daemon_threads import start_daemon
from celery_dq.wake_flag import WakeFlag

__all__ = ["FLUSH_S", "LARGEST_CLAIM", "Fetcher", "QueueSubscription"]

#: Maximum seconds that closing waits for the confirmation of all acks.
FLUSH_S = 5.0
#: Most messages in one claim.
LARGEST_CLAIM = 100


class QueueSubscription:
    """One queue that a channel consumes, with the messages that were claimed for it.

    Args:
        queue: Name of the queue.
        channel: The channel that delivers its messages.
        wake: Begins the next round of the fetcher; called from any thread.

    Attributes:
        inbox: Claimed messages. The fetcher's thread appends, and the delivering thread pops.
        received: How many messages have come into the inbox.
        closed: Whether the consumer was cancelled.
    """

    def __init__(self, queue: str, channel: Any, wake: Callable[[], None]) -> None:
        self.queue = queue
        self.channel = channel
        self.wake = wake
        self.inbox: deque[Any] = deque()
        self.received = 0
        self.closed = False

    def room(self) -> int:
        """How many messages may be claimed now; called in the fetcher's thread."""
        return 0 if self.closed else int(self.channel.room(self))

    def look_now(self) -> None:
        """Look for messages at once: this process has published one."""
        self.wake()

    def receive(self, claimed: Iterable[Any]) -> None:
        """Put claimed messages into the inbox; called in the fetcher's thread."""
        for each in claimed:
            self.inbox.append(each)
            self.received += 1
        if self.closed:
            self.close()  # it was cancelled while the claim was under way

    def release(self, claimed: Any) -> None:
        """Requeue a message that was claimed and not delivered."""
        raise NotImplementedError

    def close(self) -> None:
        """Requeue the messages that were not delivered, the youngest first."""
        self.closed = True
        # Two threads may do this at the same time.
        with contextlib.suppress(IndexError):
            while True:
                self.release(self.inbox.pop())


S = TypeVar("S", bound=QueueSubscription)


class Fetcher(Generic[S]):
    """Claims messages and sends acks for one connection; a thread, or a greenlet.

    A subclass defines a round, a claim, and the acks that the broker does not have yet. An error of it ends
    the connection. The methods of the first section may be called from any thread.

    Args:
        deliver: Called with a subscription whose inbox has a message; without one when the connection has
            failed.
    """

    #: Name of the thread.
    name = "dq-fetcher"

    def __init__(self, deliver: Callable[..., None]) -> None:
        self._deliver = deliver
        self.subscriptions: list[S] = []
        #: The subscription that has got messages last. The one behind it has the next turn.
        self._served: S | None = None
        self._waker = WakeFlag()
        #: One flag for each waiting :meth:`flush`.
        self._flushes: deque[WakeFlag] = deque()
        self._in_round = self._stopping = False
        self._thread: threading.Thread | None = None
        #: The error that ended the connection.
        self.failure: Exception | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = start_daemon(self._run, self.name)

    def wake(self, _event: object = None) -> None:
        """Begin the next round now, to send acks or claim messages; callable from signal handlers."""
        self._waker.set()

    def add(self, subscription: S) -> None:
        """Start to claim messages for a subscription."""
        self.subscriptions = [*self.subscriptions, subscription]
        self.wake()

    def cancel(self, subscription: S) -> None:
        """Stop to claim messages for a subscription, and requeue those that were not delivered."""
        self.subscriptions = [each for each in self.subscriptions if each is not subscription]
        subscription.close()
        self.flush()

    def flush(self) -> None:
        """Wait until the broker has confirmed the acks, or does not answer."""
        if self._thread is None or self._stopping or not self.is_connected:
            return
        # A round takes the acks that it sends.
        if self.has_acks or self._in_round:
            flushed = WakeFlag()
            self._flushes.append(flushed)
            self.wake()
            flushed.wait(FLUSH_S)
            flushed.close()

    def stop(self) -> None:
        """Send the acks, and end the thread."""
        self._stopping = True
        self.wake()

    # -- for subclasses, in the thread --------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Whether the broker answers, as far as this process knows."""
        return True

    @property
    def has_acks(self) -> bool:
        """Whether an ack waits to be sent."""
        raise NotImplementedError

    def has_unconfirmed_acks(self, queue: str) -> bool:
        """Whether a message of a queue has ended and the broker has not confirmed it; from any thread."""
        raise NotImplementedError

    def run_round(self) -> float:
        """Send acks and claim messages; return the seconds until the next round is due."""
        raise NotImplementedError

    def claim(self, subscription: S, room: int) -> float:
        """Claim up to *room* messages for a subscription; return the seconds until there may be more."""
        raise NotImplementedError

    def log_failure(self) -> None:
        """Log the present exception, which ends the connection."""
        raise NotImplementedError

    # -- the thread ----------------------------------------------------------------

    def rooms(self) -> list[tuple[S, int]]:
        """Return the subscriptions in the order of their turns, each with its room.

        The rooms are counted before acks are sent: a message that is released after that makes no room for a
        later one before it is in its place.
        """
        subscriptions = self.subscriptions
        first = subscriptions.index(self._served) + 1 if self._served in subscriptions else 0
        return [(each, each.room()) for each in (*subscriptions[first:], *subscriptions[:first])]

    def claim_all(self, rooms: list[tuple[S, int]]) -> float:
        """Claim for all subscriptions in turn; return the seconds until there may be more messages."""
        wait_s = math.inf
        for subscription, room in rooms:
            received = subscription.received
            room = min(room, subscription.room(), LARGEST_CLAIM)
            wait_s = min(wait_s, self.claim(subscription, room))
            if subscription.received > received:
                self._served = subscription
            if subscription.inbox:
                self._deliver(subscription)
        return wait_s

    def fail(self, error: Exception) -> None:
        """End the connection: the delivering thread raises this error."""
        self.failure, self._stopping = error, True
        self._deliver()

    def wait(self, wait_s: float) -> None:
        """Wait for a wake-up, or the time of the next round."""
        self._waker.wait(wait_s)

    def run_rounds(self) -> None:
        """Run rounds until the connection ends."""
        while not self._stopping:
            self._waker.clear()
            # Counted before the round, which may not send the acks of a flush that begins later.
            flushes, self._in_round = len(self._flushes), True
            wait_s = self.run_round()
            self._in_round = False
            if not self.has_acks:
                self._end_flushes(flushes)
            if wait_s > 0 and not self._stopping:
                self.wait(wait_s)

    def _run(self) -> None:
        try:
            self.run_rounds()
        except Exception as error:
            # The worker must be notified of any error, or it would wait for messages forever.
            self.log_failure()
            self.fail(error)
        finally:
            self._end_flushes(len(self._flushes))
            self._waker.close()

    def _end_flushes(self, count: int) -> None:
        for _ in range(count):
            self._flushes.popleft().set()
