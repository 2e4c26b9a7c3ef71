"""The delivering half of a transport whose messages come from a fetcher in a thread of its own.

The fetcher waits for the broker, so that a worker's event loop never does. It puts claimed messages into the
inbox of their source. The thread that drains the connection, or its event loop, delivers them from there.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from celery_dq.clock import Clock, SystemClock
from celery_dq.per_process import OwnerProcess
from celery_dq.transport.bases import VirtualTransport
from celery_dq.wake_flag import WakeFlag
from celery_dq.waker import Waker

__all__ = ["MessageSource", "SourceFetcher", "ThreadedTransport"]

#: Seconds of delivery after which control returns to the event loop.
ONE_TURN_S = 0.01
#: Maximum seconds of one wait in ``drain_events``.
LONGEST_WAIT_S = 1.0


class MessageSource(Protocol):
    """One queue that a channel consumes, with the messages that were claimed for it."""

    @property
    def queue(self) -> str:
        """Name of the queue."""

    @property
    def inbox(self) -> deque[Any]:
        """Claimed messages. The fetcher's thread appends, and the delivering thread pops."""

    def look_now(self) -> None:
        """Look for messages at once: this process has published one."""

    def close(self) -> None:
        """Requeue the messages that were not delivered."""


class SourceFetcher(Protocol):
    """The fetcher of one connection. All methods may be called from any thread."""

    @property
    def failure(self) -> Exception | None:
        """The error that has ended the connection."""

    def start(self) -> None:
        """Start the thread."""

    def wake(self) -> None:
        """Look again, because there is an ack to send or room for a message."""

    def add(self, source: Any) -> None:
        """Start to claim messages for a source."""

    def remove(self, source: Any) -> None:
        """Stop to claim messages for a source."""

    def flush(self) -> None:
        """Wait until the broker has confirmed the acks."""

    def stop(self) -> None:
        """Send the acks, and end the thread."""


class DeliveringChannel(Protocol):
    """A channel of the transport, as it delivers from a source."""

    def room(self, source: Any) -> int:
        """How many messages may be claimed for the source now; called in the fetcher's thread."""

    def deliver_one(self, source: Any) -> bool:
        """Deliver the oldest message of the source if that is allowed now."""


class ThreadedTransport(VirtualTransport):
    """A transport whose fetcher has a thread of its own, one for all channels of a connection.

    Args:
        client: The kombu connection.
        **kwargs: Further arguments of kombu.
    """

    queues: Any
    implements = VirtualTransport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"])
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.clock: Clock = SystemClock()
        self._owner = OwnerProcess()
        self._fetcher: SourceFetcher | None = None
        self._waker = Waker(self._deliver_all)
        #: Set at each wake-up, for `drain_events`.
        self._woken = WakeFlag()
        #: The channel of each source.
        self._sources: dict[MessageSource, DeliveringChannel] = {}
        #: The sources that may have messages, each once. The first one has the next turn.
        self.ready: deque[MessageSource] = deque()
        self._is_ready: set[MessageSource] = set()
        self._loop: Any = None
        self._interrupted = False

    # -- for subclasses ------------------------------------------------------------

    def new_fetcher(self) -> SourceFetcher:
        """Make the fetcher, which calls :meth:`room` and :meth:`wake_delivery`."""
        raise NotImplementedError

    def unusable(self, reason: str) -> Exception:
        """Make the connection error for a connection that cannot be used any more."""
        raise NotImplementedError

    @property
    def may_deliver(self) -> bool:
        """Whether this process still holds the messages in the inboxes, as far as it knows."""
        return True

    @property
    def may_leave(self) -> bool:
        """Whether the store can delete a transient queue now."""
        return True

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
            self._fetcher = fetcher
            self._attach()
            fetcher.start()
        return self._fetcher

    def wake_delivery(self, source: MessageSource | None = None) -> None:
        """Wake the delivery; callable from any thread.

        Args:
            source: A source whose inbox has got messages.
        """
        if source is not None:
            self._add_ready(source)
        if self._loop is None:
            self._woken.set()
        else:
            self._waker.wake()

    def _add_ready(self, source: MessageSource) -> None:
        if source not in self._is_ready:
            self._is_ready.add(source)
            self.ready.append(source)

    def _attach(self) -> None:
        if self._loop is not None:
            self._waker.attach(self._loop)
            # Deliver messages that arrived before the loop was attached.
            self._waker.wake()

    def look_again(self) -> None:
        """Wake the fetcher, to send acknowledgements or take more messages; callable from any thread."""
        if self._fetcher is not None:
            self._fetcher.wake()

    def room(self, source: MessageSource) -> int:
        """How many messages may be claimed for a source now."""
        channel = self._sources.get(source)
        return 0 if channel is None else channel.room(source)

    def add_source(self, channel: DeliveringChannel, source: MessageSource) -> None:
        """Start to claim messages for a source, and to deliver them to *channel*."""
        self._sources[source] = channel
        self.start_fetcher().add(source)

    def cancel(self, source: MessageSource) -> None:
        """Stop taking from *source*, and requeue its messages that were not delivered."""
        self._sources.pop(source, None)
        if self._fetcher is not None:
            self._fetcher.remove(source)
        source.close()
        self.flush()

    def flush(self) -> None:
        """Wait until the broker has confirmed the acknowledgements."""
        if self._fetcher is not None:
            self._fetcher.flush()

    def leave(self, queue: str) -> None:
        """End a channel's use of a transient queue; the queue is deleted with its last use."""
        used = any(channel.uses(queue) for channel in (*self.channels, *self._avail_channels))
        if self.may_leave and not used:
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
        if self._fetcher is not None:
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
        if not self.may_deliver:
            # Other consumers may already hold the messages in the inboxes.
            return False
        for _ in range(len(self.ready)):
            source = self.ready[0]
            channel = self._sources.get(source)
            if channel is None or not source.inbox:
                self._is_ready.discard(source)
                if channel is not None and source.inbox:  # a message has come in between
                    self._add_ready(source)
                # Last, so that a source with messages is never missing from those that a channel counts.
                self.ready.popleft()
                continue
            self.ready.rotate(-1)
            if channel.deliver_one(source):
                if not source.inbox:
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
            if any(source.inbox for source in tuple(self.ready)):
                self.wake_delivery()
            raise
