"""Watches the sockets of all channels of a connection, with an event loop or without.

With an event loop (Celery's solo, threads and prefork pools), the loop calls the poller at its ticks and when
a socket is readable. Without a loop (gevent, eventlet, plain kombu), ``drain_events`` calls
:meth:`Poller.get`, which waits itself.

A socket pair wakes the wait when another thread or greenlet has added a pending ack. A pipe would be unsafe:
its end is a bare file descriptor, and writing after close could hit a reused one.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from queue import Empty
from typing import Any

from kombu.utils.eventio import ERR, READ, poll

from celery_dq.clock import Clock
from celery_dq.compat.redis_sockets import socket_of
from celery_dq.per_process import OwnerProcess
from celery_dq.transport.in_flight.in_flight_messages import RIDE_ALONG_S
from celery_dq.transport.redis.consuming.consuming_channel import ConsumingChannel, WatchedSocket
from celery_dq.transport.redis.store.pipelined_connection import has_arrived
from celery_dq.waker import Waker

logger = logging.getLogger(__name__)

#: Longest wait, in seconds, so that dead connections are noticed.
MAX_WAIT_S = 1.0


class Poller:
    """The poller of one transport, which kombu calls the transport's *cycle*.

    Args:
        clock: Source of monotonic time.
    """

    #: Kombu's fanout code reads these two attributes. They never change here.
    _in_protected_read = False
    after_read: set[Any]

    def __init__(self, clock: Clock) -> None:
        self.after_read = set()
        self._clock = clock
        self._owner = OwnerProcess()
        self._waker = Waker(self._woken)
        self._channels: list[ConsumingChannel] = []
        self._watched: dict[int, tuple[ConsumingChannel, WatchedSocket]] = {}
        #: Whether a channel may have a socket that is not watched yet. Each turn of the loop asks.
        self._is_unwatched = False
        self._loop: Any = None
        self._timer: Any = None
        self._timer_at = 0.0
        self._waited_until = 0.0
        self._on_tick: Callable[[], None] | None = None
        self._poller: Any = None
        self._interrupted = False
        self._thread: int | None = None

    # -- channels --------------------------------------------------------------

    def add(self, channel: ConsumingChannel) -> None:
        """Watch this channel's sockets from now on."""
        if channel not in self._channels:
            self._channels.append(channel)
            self._is_unwatched = True

    def discard(self, channel: ConsumingChannel) -> None:
        """Stop watching this channel's sockets."""
        if channel in self._channels:
            self._channels.remove(channel)
        for fd, (owner, _) in list(self._watched.items()):
            if owner is channel:
                self._unwatch(fd)

    def forget_connection(self, connection: Any) -> None:
        """Stop watching a connection that is about to close, because its file descriptor will be reused."""
        for fd, (_, watched) in list(self._watched.items()):
            if watched.connection is connection:
                self._unwatch(fd)

    def watch_again(self) -> None:
        """Watch a socket that a channel is about to open, from the end of the present turn on."""
        self._is_unwatched = True

    @property
    def is_driven(self) -> bool:
        """Whether an event loop or ``drain_events`` runs, so that pending acks are sent soon."""
        return self._loop is not None or self._thread is not None

    # -- with an event loop ----------------------------------------------------

    def register(self, loop: Any) -> None:
        """Register with a kombu event loop, which drives this poller from now on."""
        self.unregister()
        self._loop = loop
        self._thread = None
        self._on_tick = self._tick
        loop.on_tick.add(self._on_tick)
        self._waker.attach(loop)
        # The sockets of channels that were opened before were watched without the event loop.
        for fd in list(self._watched):
            loop.add_reader(fd, self._read, fd)

    def unregister(self) -> None:
        """Remove all callbacks from the event loop.

        The transports of kombu itself leave a tick callback in the loop at every reconnect.
        """
        self._forget_inherited()
        loop, self._loop = self._loop, None
        if loop is None:
            return
        loop.on_tick.discard(self._on_tick)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for fd in list(self._watched):
            loop.remove_reader(fd)
        self._waker.detach()

    def _tick(self) -> None:
        self._thread = threading.get_ident()
        self._tick_channels()
        for channel in tuple(self._channels):
            if channel.has_inbox:
                # Not delivered in the tick: the tick of the pool may already be over in this turn. The pool
                # would then write the task to its child only after the next event.
                self._waker.wake()

    def _set_timer(self) -> None:
        deadline = self._deadline()
        if self._timer is not None:
            if self._timer_at <= deadline + 0.0005 and deadline < math.inf:
                return
            self._timer.cancel()
            self._timer = None
        if deadline < math.inf:
            self._timer_at = deadline
            self._timer = self._loop.call_later(
                max(deadline - self._clock.monotonic(), 0.0), self._timer_fired
            )

    def _timer_fired(self) -> None:
        self._timer = None
        deadline = self._deadline()
        if deadline > self._clock.monotonic():
            # The timer was set for a deadline that no longer exists.
            self._set_timer()
        # Otherwise the next tick sends the due calls, and their answers set the timer again.

    # -- without an event loop -------------------------------------------------

    def get(self, callback: Any, timeout: float | None = None) -> None:
        """Deliver one message, or one batch of broadcasts.

        Args:
            callback: Unused; every channel knows its consumers.
            timeout: Longest wait, in seconds; None waits until a message comes.

        Raises:
            queue.Empty: No message came in time.
            TimeoutError: :meth:`interrupt` was called, and no message has come.
        """
        end = None if timeout is None else self._clock.monotonic() + timeout
        self._thread = threading.get_ident()
        try:
            for channel in self._channels:
                channel.consumer.pace.end()
            while True:
                for channel in self._channels:
                    if channel.consumer.was_busy_since(self._waited_until):
                        # A new claim may bring messages that precede those of the inbox by now.
                        if self._wait(self._clock.monotonic()):
                            return
                        self._tick_channels()
                        break
                for channel in tuple(self._channels):
                    # A message that no consumer receives, such as a discard, costs no turn of the loop.
                    while channel.consumer.has_undelivered:
                        if channel.consumer.deliver_one():
                            if channel in self._channels:  # the callback may have closed it
                                self._channels.remove(channel)
                                self._channels.append(channel)
                            return
                self._tick_channels()
                interrupted = self._interrupted
                if self._wait(self._clock.monotonic() if interrupted else end):
                    return
                if interrupted:
                    # After Empty, kombu would call again until the caller's timeout is over.
                    raise TimeoutError("the worker stops")
                if end is not None and self._clock.monotonic() >= end and not self._any_inbox():
                    raise Empty
        finally:
            self._thread = None
            for channel in tuple(self._channels):
                channel.send_acks_after_batch()

    def _tick_channels(self) -> None:
        for channel in tuple(self._channels):
            channel.tick()
        if self._is_unwatched:
            for channel in self._channels:
                self._watch_connections(channel)
            self._is_unwatched = False

    def _wait(self, end: float | None) -> bool:
        """Wait until *end* for sockets, and read them; return whether a broadcast was delivered."""
        now = self._clock.monotonic()
        longest = MAX_WAIT_S if end is None else min(max(end - now, 0.0), MAX_WAIT_S)
        if any(channel.expects_answer for channel in self._channels):
            # Redis has counted the messages of the answer as in flight here, so the timeout may be exceeded.
            longest = max(longest, 0.1)
        if self._any_inbox():
            longest = 0.0
        longest = min(longest, max(self._deadline() - now, 0.0))
        delivered = False
        for fd, _event in self._open_poller().poll(longest) or ():
            if fd not in self._watched:
                self._waker.clear()
            elif self._read(fd):
                delivered = True
        # Time up to here was waiting, so it does not count as service time of the consumer.
        self._waited_until = self._clock.monotonic()
        return delivered

    def _any_inbox(self) -> bool:
        return any(channel.has_inbox for channel in self._channels)

    def _open_poller(self) -> Any:
        if self._poller is None:
            self._poller = poll()
            self._poller.register(self._waker.fileno(), READ | ERR)
            for fd in self._watched:
                self._poller.register(fd, READ | ERR)
        return self._poller

    # -- sockets ---------------------------------------------------------------

    def _watch_connections(self, channel: ConsumingChannel) -> None:
        for watched in channel.connections():
            sock = socket_of(watched.connection)
            fd = sock.fileno() if sock is not None else -1
            if fd < 0:
                continue
            known = self._watched.get(fd)
            if known is not None and known[1][:2] != watched[:2]:
                self._unwatch(fd)
                known = None
            self._watched[fd] = (channel, watched)  # also a known one, whose reader may be another by now
            if known is not None:
                continue
            if self._loop is not None:
                self._loop.add_reader(fd, self._read, fd)
            elif self._poller is not None:
                self._poller.register(fd, READ | ERR)

    def _unwatch(self, fd: int) -> None:
        self._forget_inherited()
        if self._watched.pop(fd, None) is None:
            return
        try:
            if self._loop is not None:
                self._loop.remove_reader(fd)
            elif self._poller is not None:
                self._poller.unregister(fd)
        except (OSError, ValueError, KeyError) as exc:
            # Pollers raise different errors for a socket that is already closed.
            logger.debug("Socket %d was no longer watched: %r.", fd, exc)

    def _read(self, fd: int) -> bool:
        known = self._watched.get(fd)
        if known is None:
            return False
        channel, watched = known
        # The event may belong to a connection that was closed in this round and had the same file descriptor.
        # Reading would then block. Answers of scripts are exempt: they are frequent, and arrive at once.
        is_expected = watched.kind == "scripts" and channel.expects_answer
        if not (is_expected or has_arrived(watched.connection)):
            return False
        if self._loop is None:
            return channel.on_readable(watched, deliver=False)
        self._thread = threading.get_ident()
        delivered = channel.on_readable(watched, deliver=True)
        # In the tick it would be too late, because the loop computes its wait before its ticks.
        self._set_timer()
        return delivered

    def _deadline(self) -> float:
        return min([channel.next_deadline() for channel in self._channels], default=math.inf)

    # -- waking ----------------------------------------------------------------

    def wake(self, within_s: float = RIDE_ALONG_S) -> None:
        """End the wait of another thread or greenlet, if there is one.

        Args:
            within_s: seconds after which, at the latest, an event loop must tick.
        """
        if self._waker.is_pending or self._thread is None:
            return
        if self._thread == threading.get_ident():
            # This thread drives the loop, and the tick before its next wait sends pending acks. The loop
            # computes its wait before the tick, so a timer must be set for acks that wait for a claim.
            if self._loop is not None and (
                self._timer is None or self._timer_at > self._clock.monotonic() + within_s
            ):
                self._set_timer()
            return
        self._waker.wake()

    def interrupt(self) -> None:
        """End the present wait and begin no other, because the worker stops.

        Safe in signal handlers.
        """
        self._interrupted = True
        self._waker.wake()

    def _woken(self) -> None:
        if self._loop is not None:
            for channel in tuple(self._channels):
                channel.follow_leaderships()
                if channel.has_inbox:
                    channel.consumer.deliver_all()
        if self._loop is not None:
            self._set_timer()

    def _forget_inherited(self) -> None:
        # Parent and child share one epoll interest list. A child that unregistered its inherited sockets
        # would stop the events of the parent.
        if not self._owner.is_current:
            self._owner = OwnerProcess()
            self._watched.clear()
            self._is_unwatched = True
            self._loop = self._timer = self._poller = None
            self._waker.close()
            self._waker = Waker(self._woken)

    def close(self) -> None:
        """Stop watching, and close the poller's own file descriptors."""
        self._forget_inherited()
        for fd in list(self._watched):
            self._unwatch(fd)
        self.unregister()
        if self._poller is not None:
            self._poller.close()
            self._poller = None
        self._waker.close()
