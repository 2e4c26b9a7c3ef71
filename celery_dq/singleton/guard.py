"""Kills the process that runs a message whose term nobody confirms any more.

A leader that is stopped or cut off cannot be asked to stop its work. So the work stops by itself: while a
message of a led queue runs, the kernel holds an alarm for the process that runs it (the pool's child, or the
worker where the pool has none), set to the end of the term's trust. A thread in that process sets it anew
as long as the worker's main process moves the end of trust forward, in memory that they share. When it does
not, SIGALRM ends the process: also one that is stopped and goes on later, and one that never lets go of
the interpreter.

A task that uses ``signal.alarm`` or ``setitimer(ITIMER_REAL)`` itself cannot run on a led queue.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import struct
import threading
from collections.abc import Sequence

from celery_dq.clock import Clock, SystemClock
from celery_dq.native import unpatched

__all__ = ["Guard"]

logger = logging.getLogger(__name__)

#: Per queue: end of trust (monotonic seconds) and token, which the main process writes, and the process that
#: runs a message of it (0 = none), which that process writes.
_TRUST, _NUMBER = struct.Struct("=d"), struct.Struct("=q")
_TOKEN_AT, _PID_AT, _SLOT_SIZE = 8, 16, 24
#: Seconds between two looks at the end of trust.
LOOK_S = 0.05
#: setitimer(0) would switch the alarm off.
SHORTEST_S = 0.001


class Guard:
    """The ends of trust of all led queues of one worker.

    To be made before the pool forks, which makes it shared.
    """

    def __init__(self, queues: Sequence[str], clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._places = {name: number * _SLOT_SIZE for number, name in enumerate(sorted(queues))}
        self._memory = mmap.mmap(-1, max(len(self._places), 1) * _SLOT_SIZE)
        self._watches: dict[int, _Watch] = {}

    # -- the main process

    def trust(self, queue: str, token: int, until: float) -> None:
        """The term with this token is trusted until monotonic `until`."""
        place = self._places[queue]
        if self._read(queue)[1] != token:
            # Never the new token with the old trust or the other way round.
            _TRUST.pack_into(self._memory, place, 0.0)
            _NUMBER.pack_into(self._memory, place + _TOKEN_AT, token)
        _TRUST.pack_into(self._memory, place, until)

    def revoke(self, queue: str, token: int) -> None:
        """That term is over: what runs of it dies within :data:`LOOK_S`."""
        if self._read(queue)[1] == token:
            _TRUST.pack_into(self._memory, self._places[queue], 0.0)

    def runs(self, queue: str) -> bool:
        """Whether a living process is inside a message of the queue."""
        pid = self._read(queue)[2]
        if not pid:
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    # -- the process that runs the message

    def begin(self, queue: str, token: int) -> None:
        """A message begins to run in this process, which does not survive this if its term is over."""
        until, present, _ = self._read(queue)
        if present != token or until <= self._clock.monotonic():
            logger.critical("A message of %r, token %d, is not run: its term is over.", queue, token)
            os.kill(os.getpid(), signal.SIGKILL)
        _disarm_handlers()
        _NUMBER.pack_into(self._memory, self._places[queue] + _PID_AT, os.getpid())
        watch = self._watches.get(os.getpid())
        if watch is None:
            # One per process, whichever thread is first: there is only one alarm.
            made = _Watch()
            watch = self._watches.setdefault(os.getpid(), made)
            if watch is made:
                unpatched("_thread", "start_new_thread")(self._look_on, (watch,))
        with watch.lock:
            watch.running[queue] = token
            self._arm(watch)
        watch.wake()

    def end(self, queue: str) -> None:
        """It has ended, whatever its outcome."""
        watch = self._watches.get(os.getpid())
        if watch is not None and queue in watch.running:
            with watch.lock:
                del watch.running[queue]
                self._arm(watch)
            _NUMBER.pack_into(self._memory, self._places[queue] + _PID_AT, 0)

    # -- inside

    def _look_on(self, watch: _Watch) -> None:
        sleep = unpatched("time", "sleep")
        while True:
            watch.wait()
            while watch.running:
                with watch.lock:
                    self._arm(watch)
                sleep(LOOK_S)

    def _arm(self, watch: _Watch) -> None:
        """Set the alarm to the first end of trust; under the lock of the watch."""
        left = []
        for queue, token in watch.running.items():
            until, present, _ = self._read(queue)
            left.append(until - self._clock.monotonic() if present == token else 0.0)
        signal.setitimer(signal.ITIMER_REAL, max(min(left), SHORTEST_S) if left else 0.0)

    def _read(self, queue: str) -> tuple[float, int, int]:
        place = self._places[queue]
        until: float = _TRUST.unpack_from(self._memory, place)[0]
        token: int = _NUMBER.unpack_from(self._memory, place + _TOKEN_AT)[0]
        pid: int = _NUMBER.unpack_from(self._memory, place + _PID_AT)[0]
        return until, token, pid


def _disarm_handlers() -> None:
    """See to it that the alarm kills: a handler in Python would wait for the interpreter, or forgive."""
    if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        except ValueError:
            logger.critical(
                "Somebody handles SIGALRM in this process: what runs past its term is not killed."
            )


class _Watch:
    """What one process runs, and the thread that looks after it."""

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self.lock = unpatched("_thread", "allocate_lock")()
        self._bell = unpatched("_thread", "allocate_lock")()
        self._bell.acquire()

    def wake(self) -> None:
        """Somebody runs."""
        try:
            self._bell.release()
        except (RuntimeError, threading.ThreadError):  # it rings already
            return

    def wait(self) -> None:
        """Wait until somebody runs."""
        self._bell.acquire()
