"""Watches the sockets of all channels of a connection, with an event loop or without.

With a loop (Celery's solo, threads and prefork pools) the poller hangs on its
ticks and readers. Without one (gevent, eventlet, plain kombu) ``drain_events``
calls :meth:`Poller.get`, which waits by itself.

A bell wakes the wait when another thread or greenlet has put something into the
ledger: a pair of sockets. The end of a pipe is a mere number, and whoever writes to it
while it is closed may meet somebody else's file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from queue import Empty
from typing import TYPE_CHECKING, Any

from kombu.utils.eventio import ERR, READ, poll

from celery_dq.clock import Clock
from celery_dq.transport.redis.ledger import COMPANY_SECONDS

if TYPE_CHECKING:
    from celery_dq.transport.redis.channel import Channel

logger = logging.getLogger(__name__)

#: Seconds that a wait lasts at most, so that dead connections are noticed.
LONGEST_WAIT = 1.0


class Poller:
    """One per transport. Kombu calls such an object the transport's *cycle*."""

    #: kombu's fanout code asks for these two; nothing is read in a protected way here.
    _in_protected_read = False
    after_read: set[Any]

    def __init__(self, clock: Clock) -> None:
        self.after_read = set()
        self._clock = clock
        self._pid = os.getpid()
        self._channels: list[Channel] = []
        self._watched: dict[int, tuple[Channel, str, Any]] = {}
        self._loop: Any = None
        self._timer: Any = None
        self._timer_at = 0.0
        self._waited_until = 0.0
        self._on_tick: Callable[[], None] | None = None
        self._poller: Any = None
        self._bell: tuple[socket.socket, socket.socket] | None = None
        self._rung = False
        self._interrupted = False
        self._thread: int | None = None

    # -- channels --------------------------------------------------------------

    def add(self, channel: Channel) -> None:
        """Watch this channel's sockets from now on."""
        if channel not in self._channels:
            self._channels.append(channel)

    def discard(self, channel: Channel) -> None:
        """Stop watching this channel's sockets."""
        if channel in self._channels:
            self._channels.remove(channel)
        for fd, (owner, _, _) in list(self._watched.items()):
            if owner is channel:
                self._unwatch(fd)

    def forget_connection(self, connection: Any) -> None:
        """A connection is being closed: stop watching its socket, whose number will be reused."""
        for fd, (_, _, watched) in list(self._watched.items()):
            if watched is connection:
                self._unwatch(fd)

    @property
    def driven(self) -> bool:
        """Something turns the loop, so that what the ledger has to tell will be told soon."""
        return self._loop is not None or self._thread is not None

    # -- with an event loop ----------------------------------------------------

    def register(self, loop: Any) -> None:
        """Hang on the ticks and readers of a kombu event loop."""
        self.unregister()
        self._loop = loop
        self._thread = None
        self._on_tick = self._tick
        loop.on_tick.add(self._on_tick)
        loop.add_reader(self._hang_bell(), self._heard)
        # Channels that were opened before the loop took over were watched by our own poller.
        for fd in list(self._watched):
            loop.add_reader(fd, self._read, fd)

    def unregister(self) -> None:
        """Let go of the loop: kombu's own transports leave their ticks behind at every reconnect."""
        self._forget_the_parents()
        loop, self._loop = self._loop, None
        if loop is None:
            return
        loop.on_tick.discard(self._on_tick)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for fd in list(self._watched):
            loop.remove_reader(fd)
        if self._bell is not None:
            loop.remove_reader(self._bell[0].fileno())

    def _tick(self) -> None:
        self._thread = threading.get_ident()
        for channel in tuple(self._channels):
            channel.tick()
            self._watch_wires(channel)
            if channel.has_inbox:
                # Not in a tick: the pool may have had its own for this turn, and would write the
                # task to its child only when something else ends the wait.
                self._ring()

    def _set_timer(self) -> None:
        deadline = self._deadline()
        if self._timer is not None:
            if deadline is not None and self._timer_at <= deadline + 0.0005:
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer_at = deadline
            self._timer = self._loop.call_later(
                max(deadline - self._clock.monotonic(), 0.0), self._timer_fired
            )

    def _timer_fired(self) -> None:
        self._timer = None
        deadline = self._deadline()
        if deadline is not None and deadline > self._clock.monotonic():
            # It was set for something that is done meanwhile.
            self._set_timer()
        # Else the tick that follows sends what is due, and the answer brings us here again.

    # -- without one -----------------------------------------------------------

    def get(self, callback: Any, timeout: float | None = None) -> None:
        """Deliver one message, or one batch of broadcasts.

        Arguments:
            callback: unused; every channel knows its consumers.
            timeout: seconds to wait; None waits until something comes.

        Raises:
            queue.Empty: nothing came in time.
            TimeoutError: :meth:`interrupt` was called, and nothing has come.
        """
        end = None if timeout is None else self._clock.monotonic() + timeout
        self._thread = threading.get_ident()
        try:
            for channel in self._channels:
                channel.intake.asked()
            while True:
                for channel in self._channels:
                    if channel.intake.was_busy(self._waited_until):
                        # Between two messages: what is in the inbox may not be what is next by now.
                        if self._wait(self._clock.monotonic()):
                            return
                        self._ask()
                        break
                for channel in tuple(self._channels):
                    if channel.deliver_one():
                        if channel in self._channels:  # the callback may have closed it
                            self._channels.remove(channel)
                            self._channels.append(channel)
                        return
                self._ask()
                interrupted = self._interrupted
                if self._wait(self._clock.monotonic() if interrupted else end):
                    return
                if interrupted:
                    # Not Empty, after which kombu asks again until the caller's time is over.
                    raise TimeoutError("the worker stops")
                if end is not None and self._clock.monotonic() >= end and not self._any_inbox():
                    raise Empty
        finally:
            self._thread = None
            for channel in tuple(self._channels):
                channel.tell_at_end_of_batch()

    def _ask(self) -> None:
        for channel in tuple(self._channels):
            channel.tick()
            self._watch_wires(channel)

    def _wait(self, end: float | None) -> bool:
        """Wait for sockets, and handle what comes; return whether a broadcast was delivered."""
        now = self._clock.monotonic()
        longest = LONGEST_WAIT if end is None else min(max(end - now, 0.0), LONGEST_WAIT)
        if any(channel.expects_answer for channel in self._channels):
            # The answer is on its way whatever the caller's patience: what it brings is held by us.
            longest = max(longest, 0.1)
        if self._any_inbox():
            longest = 0.0
        deadline = self._deadline()
        if deadline is not None:
            longest = min(longest, max(deadline - now, 0.0))
        delivered = False
        for fd, _event in self._open_poller().poll(longest) or ():
            if self._bell is not None and fd == self._bell[0].fileno():
                self._heard()
            elif self._read(fd):
                delivered = True
        # Until now it was us who kept the consumer waiting.
        self._waited_until = self._clock.monotonic()
        return delivered

    def _any_inbox(self) -> bool:
        return any(channel.has_inbox for channel in self._channels)

    def _open_poller(self) -> Any:
        if self._poller is None:
            self._poller = poll()
            self._poller.register(self._hang_bell(), READ | ERR)
            for fd in self._watched:
                self._poller.register(fd, READ | ERR)
        return self._poller

    # -- sockets ---------------------------------------------------------------

    def _watch_wires(self, channel: Channel) -> None:
        for kind, connection in channel.connections():
            sock = getattr(connection, "_sock", None)
            fd = sock.fileno() if sock is not None else -1
            if fd < 0:
                continue
            known = self._watched.get(fd)
            if known is not None:
                if known[2] is connection and known[1] == kind:
                    continue
                self._unwatch(fd)
            self._watched[fd] = (channel, kind, connection)
            if self._loop is not None:
                self._loop.add_reader(fd, self._read, fd)
            elif self._poller is not None:
                self._poller.register(fd, READ | ERR)

    def _unwatch(self, fd: int) -> None:
        self._forget_the_parents()
        if self._watched.pop(fd, None) is None:
            return
        try:
            if self._loop is not None:
                self._loop.remove_reader(fd)
            elif self._poller is not None:
                self._poller.unregister(fd)
        except (OSError, ValueError, KeyError) as exc:
            # Pollers differ in what they say of a socket that is closed already.
            logger.debug("Socket %d was no longer watched: %r.", fd, exc)

    def _read(self, fd: int) -> bool:
        known = self._watched.get(fd)
        if known is None:
            return False
        channel, kind, _ = known
        if self._loop is None:
            return channel.on_readable(fd, kind, deliver=False)
        self._thread = threading.get_ident()
        delivered = channel.on_readable(fd, kind, deliver=True)
        # Not in the tick: by then the loop has computed how long it is going to wait.
        self._set_timer()
        return delivered

    def _deadline(self) -> float | None:
        times = [at for at in (channel.next_deadline() for channel in self._channels) if at is not None]
        return min(times) if times else None

    # -- waking ----------------------------------------------------------------

    def wake(self) -> None:
        """End the wait that goes on in another thread or greenlet, if there is one."""
        if self._rung or self._bell is None or self._thread is None:
            return
        if self._thread == threading.get_ident():
            # Whoever turns the loop looks before he waits. For how long is computed before the tick.
            # What the ledger has waits for company at most, so a timer that is set is early enough.
            if self._loop is not None and (
                self._timer is None or self._timer_at > self._clock.monotonic() + COMPANY_SECONDS
            ):
                self._set_timer()
            return
        if self._pid != os.getpid():
            return  # asked last, for it is a system call
        self._ring()

    def interrupt(self) -> None:
        """End the wait that may be going on, and begin no other: who waits here is about to leave.

        For signal handlers, which may have interrupted anything.
        """
        self._interrupted = True
        self._ring()

    def _ring(self) -> None:
        bell = self._bell  # which may be taken down meanwhile
        if bell is None:
            return
        self._rung = True
        try:
            bell[1].send(b"!")
        except BlockingIOError:
            pass  # it rings loudly enough
        except OSError as exc:
            self._rung = False
            logger.debug("The poller could not be woken: %r.", exc)

    def _hang_bell(self) -> int:
        if self._bell is None:
            self._bell = socket.socketpair()
            for end in self._bell:
                end.setblocking(False)
            # What was rung where there was no bell was heard by nobody.
            self._rung = False
        return self._bell[0].fileno()

    def _heard(self) -> None:
        if self._bell is not None:
            with contextlib.suppress(BlockingIOError):
                self._bell[0].recv(4096)
        # Not before: a bell rung in between would have lost its byte, and no other one would ring.
        self._rung = False
        if self._loop is not None:
            for channel in tuple(self._channels):
                channel.follow_terms()
                if channel.has_inbox:
                    channel.intake.deliver_all()
        if self._loop is not None:
            self._set_timer()

    def _forget_the_parents(self) -> None:
        # The kernel keeps one interest list for a process and its children: a child that took its
        # inherited sockets off it would make the parent deaf.
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._watched.clear()
            self._loop = self._timer = self._poller = None

    def close(self) -> None:
        """Stop watching, and give the file descriptors back."""
        self._forget_the_parents()
        for fd in list(self._watched):
            self._unwatch(fd)
        self.unregister()
        if self._poller is not None:
            self._poller.close()
            self._poller = None
        bell, self._bell = self._bell, None
        if bell is not None:
            for end in bell:
                end.close()
