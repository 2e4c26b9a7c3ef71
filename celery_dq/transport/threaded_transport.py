"""The delivering half of a transport whose messages come from a :mod:`celery_dq.transport.fetcher`."""

from __future__ import annotations

from collections import deque
from typing import Any

from celery_dq.clock import Clock, SystemClock
from celery_dq.context import AppContext
from celery_dq.options.resolve import resolve
from celery_dq.options.sections import Options
from celery_dq.per_process import OwnerProcess
from celery_dq.transport.bases import VirtualTransport
from celery_dq.transport.fetcher import Fetcher, QueueSubscription
from celery_dq.transport.packer import Packer
from celery_dq.wake_flag import WakeFlag
from celery_dq.waker import Waker

__all__ = ["ThreadedTransport", "app_context_of"]

#: Seconds of delivery after which control returns to the event loop.
ONE_TURN_S = 0.01
#: Maximum seconds of one wait in ``drain_events``.
LONGEST_WAIT_S = 1.0


def app_context_of(connection: Any) -> AppContext:
    """Return the context of the app of a kombu connection; in plain kombu, one with default options."""
    context = AppContext.of(connection)
    if context is None:
        # In plain kombu, the connection keeps the context, because it outlives its transports.
        context = connection.__dict__.get("_dq_context")
    if context is None:
        context = connection.__dict__["_dq_context"] = AppContext("dq", lambda: resolve({}))
    return context


class ThreadedTransport(VirtualTransport):
    """A transport whose fetcher has a thread of its own, one for all channels of a connection.

    Args:
        client: The kombu connection.
        **kwargs: Further arguments of kombu.
    """

    #: The queues and the bindings of the store, and the messages in flight.
    queues: Any
    bindings: Any
    in_flight: Any
    #: The part of a worker that does Celery's bookkeeping; None if this process is not a worker.
    worker: Any
    #: The error of a connection that cannot be used any more.
    unusable: type[Exception]
    implements = VirtualTransport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"])
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.clock: Clock = SystemClock()
        self._app_context = app_context_of(client)
        self.options: Options = self._app_context.options
        self.packer = Packer(self.options, self.clock)
        self._owner = OwnerProcess()
        self._fetcher: Fetcher[Any] | None = None
        self._waker = Waker(self._deliver_all)
        #: Set at each wake-up, for `drain_events`.
        self._woken = WakeFlag()
        #: The subscriptions that may have messages, each once. The first one has the next turn.
        self.ready: deque[QueueSubscription] = deque()
        self._is_ready: set[QueueSubscription] = set()
        self._loop: Any = None
        self._interrupted = False

    # -- for subclasses ------------------------------------------------------------

    def new_fetcher(self) -> Fetcher[Any]:
        """Make the fetcher, which calls :meth:`wake_delivery`."""
        raise NotImplementedError

    def subscribe(self, channel: Any, queue: str) -> QueueSubscription:
        """Make the subscription of a channel to a queue; nothing is claimed yet."""
        raise NotImplementedError

    def claim_one(self, fetcher: Any, queue: str) -> list[Any]:
        """Claim one message of *queue*, if one is available, in the thread of the caller."""
        raise NotImplementedError

    # -- consuming -----------------------------------------------------------------

    def qos_semantics_matches_spec(self, connection: Any) -> bool:
        """Return False: otherwise Celery does not reduce the prefetch count after a reconnect."""
        return False

    def refuse_inherited(self) -> None:
        """Refuse to use a connection that was inherited through a fork; raises a connection error."""
        if not self._owner.is_current:
            raise self.unusable(
                "This connection was opened before a fork: open a new one in the child process"
            )

    def start_fetcher(self) -> Any:
        """Return the fetcher, which is started at the first call."""
        if self._fetcher is None:
            fetcher = self.new_fetcher()
            self._attach()
            fetcher.start()
            self._fetcher = fetcher
        return self._fetcher

    def wake_delivery(self, subscription: QueueSubscription | None = None) -> None:
        """Wake the delivery; callable from any thread.

        Args:
            subscription: A subscription whose inbox has got messages.
        """
        if subscription is not None:
            self._add_ready(subscription)
        if self._loop is None:
            self._woken.set()
        else:
            self._waker.wake()

    def _add_ready(self, subscription: QueueSubscription) -> None:
        if subscription not in self._is_ready:
            self._is_ready.add(subscription)
            self.ready.append(subscription)

    def _attach(self) -> None:
        if self._loop is not None:
            self._waker.attach(self._loop)
            # Deliver messages that arrived before the loop was attached.
            self._waker.wake()

    def take_one(self, queue: str) -> list[Any]:
        """Claim one message of *queue* now; an empty list if none is available."""
        self.refuse_inherited()
        fetcher = self.start_fetcher()
        # A message that was requeued before this call is in its place then.
        fetcher.flush()
        if fetcher.failure is not None:
            raise self.unusable(str(fetcher.failure)) from fetcher.failure
        return self.claim_one(fetcher, queue)

    def look_again(self) -> None:
        """Wake the fetcher, to send acknowledgements or take more messages; callable from any thread."""
        if self._fetcher is not None:
            self._fetcher.wake()

    def cancel(self, subscription: QueueSubscription) -> None:
        """Stop taking from a subscription, and requeue its messages that were not delivered."""
        if self._fetcher is not None:
            self._fetcher.cancel(subscription)

    def flush(self) -> None:
        """Wait until the broker has confirmed the acknowledgements."""
        if self._fetcher is not None:
            self._fetcher.flush()

    def has_unconfirmed_acks(self, queue: str) -> bool:
        """Whether a message of a queue has ended, and the broker may still confirm it; from any thread."""
        fetcher = self._fetcher
        # A fetcher that has failed sends no more acks.
        return fetcher is not None and fetcher.failure is None and fetcher.has_unconfirmed_acks(queue)

    def leave(self, queue: str) -> None:
        """End a channel's use of a transient queue; the queue is deleted with its last use."""
        used = any(channel.uses(queue) for channel in (*self.channels, *self._avail_channels))
        if not used:
            try:
                self.queues.leave(queue)
            except self.connection_errors + self.channel_errors:
                # The queue is deleted later, like that of a user that was killed.
                return

    def close_connection(self, connection: Any) -> None:
        """Close all channels, requeue their messages, and end the fetcher."""
        if self._owner.is_current:
            super().close_connection(connection)
            fetcher, self._fetcher = self._fetcher, None
            if fetcher is not None:
                fetcher.stop()
            self._waker.close()
            self._woken.close()

    # -- delivering ----------------------------------------------------------------

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Deliver messages in the event loop *loop* from now on."""
        self._loop = loop
        self._attach()

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver one message.

        Raises:
            TimeoutError: No message came within `timeout` seconds.
            DQError: The connection has failed, with the transport's own class; a new one is needed.
        """
        self.refuse_inherited()
        self.start_fetcher()
        end = None if timeout is None else self.clock.monotonic() + timeout
        while not self._deliver_one():
            left = LONGEST_WAIT_S if end is None else end - self.clock.monotonic()
            if left <= 0 or self._interrupted:
                raise TimeoutError
            self._woken.wait(min(left, LONGEST_WAIT_S))

    def interrupt(self) -> None:
        """End the present wait and begin no other, because the worker stops; callable in signal handlers."""
        self._interrupted = True
        self._woken.set()

    def _deliver_one(self) -> bool:
        fetcher = self._fetcher
        if fetcher is None:
            return False
        if fetcher.failure is not None:
            raise self.unusable(str(fetcher.failure)) from fetcher.failure
        if not fetcher.is_connected:
            # Other consumers may already hold the messages in the inboxes.
            return False
        for _ in range(len(self.ready)):
            subscription = self.ready[0]
            if subscription.closed or not subscription.inbox:
                self._is_ready.discard(subscription)
                if subscription.inbox and not subscription.closed:  # a message has come in between
                    self._add_ready(subscription)
                # Last, so that no subscription with messages is missing from those that a channel counts.
                self.ready.popleft()
                continue
            self.ready.rotate(-1)
            if subscription.channel.deliver_one(subscription):
                if not subscription.inbox:
                    fetcher.wake()
                return True
        return False

    def _deliver_all(self) -> None:
        until = self.clock.monotonic() + ONE_TURN_S
        try:
            while self._deliver_one():
                if self.clock.monotonic() > until:
                    # The solo pool runs tasks in this call: between them, the loop must notice a shutdown.
                    self.wake_delivery()
                    return
        except BaseException:
            # Deliver the remaining messages without waiting for the next event.
            if any(subscription.inbox for subscription in tuple(self.ready)):
                self.wake_delivery()
            raise
