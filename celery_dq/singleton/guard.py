"""Kills the process that runs a message whose term nobody confirms any more.

A leader that is stopped or cut off cannot be asked to stop its work. So the work stops by itself: while a
message of a led queue runs, the kernel holds an alarm for the process that runs it (the pool's child, or the
worker where the pool has none), set to the end of the term's trust. A thread in that process sets it anew
as long as the worker's main process moves the end of trust forward, in memory that they share; where that is
the same process, it does so itself. When it does not, SIGALRM ends the process: also one that is stopped and
goes on later, and one that never lets go of the interpreter.

Between two messages the alarm stays set, because to switch it off and on costs as much as a short task; the
thread switches it off when it finds nothing running. So a process that is stopped within 0.05 s of the end
of a message (a second, where the pool has no processes), and for longer than its term is trusted, ends as if
it had been stopped before.

A task that uses ``signal.alarm`` or ``setitimer(ITIMER_REAL)`` itself cannot run on a led queue.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import weakref
from collections.abc import Sequence
from functools import partial

from celery_dq.clock import Clock, SystemClock
from celery_dq.native import unpatched

__all__ = ["Guard"]

logger = logging.getLogger(__name__)

#: Words of 8 bytes per queue: end of trust (monotonic seconds) and token, which the main process writes, and
#: the process that runs a message of it (0 = none), which that process writes.
_TRUST, _TOKEN, _PID, _WORDS = 0, 1, 2, 3
#: Seconds between two looks at the end of trust.
LOOK_S = 0.05
#: The longest time between two in the main process, which needs none to hear of the end of trust: each has
#: the interpreter change threads in the midst of a message.
MAIN_LOOK_S = 1.0
#: setitimer(0) would switch the alarm off.
SHORTEST_S = 0.001
#: So soon before the alarm goes off, the end of a message switches it off itself: the thread may be late.
SOON_S = 6 * LOOK_S
NEVER = float("inf")


class Guard:
    """The ends of trust of all led queues of one worker.

    To be made before the pool forks, which makes it shared.
    """

    def __init__(self, queues: Sequence[str], clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._places = {name: number * _WORDS for number, name in enumerate(sorted(queues))}
        memory = memoryview(mmap.mmap(-1, max(len(self._places), 1) * _WORDS * 8))
        # The same memory, as what is written at once: half a number is never read.
        self._ends, self._numbers = memory.cast("d"), memory.cast("q")
        # The main process only: a leader that hands over goes on renewing until what runs has ended.
        self._revoked: dict[str, int] = {}
        self._deciding = unpatched("_thread", "allocate_lock")()
        self._is_child = False
        self._start_anew()
        # Not by looking at the pid: that is a system call, for every message.
        os.register_at_fork(after_in_child=partial(_forget_the_parents, weakref.ref(self)))

    # -- the main process

    def trust(self, queue: str, token: int, until: float) -> None:
        """The term with this token is trusted until monotonic `until`; not any more once it was revoked."""
        place = self._places[queue]
        with self._deciding:
            if token <= self._revoked.get(queue, 0):
                return
            if self._numbers[place + _TOKEN] != token:
                # Never the new token with the old trust or the other way round.
                self._ends[place + _TRUST] = 0.0
                self._numbers[place + _TOKEN] = token
            self._ends[place + _TRUST] = until
        self._look()

    def revoke(self, queue: str, token: int) -> None:
        """That term is over: what runs of it dies within :data:`LOOK_S`, whatever is confirmed meanwhile."""
        with self._deciding:
            self._revoked[queue] = max(self._revoked.get(queue, 0), token)
            place = self._places[queue]
            if self._numbers[place + _TOKEN] == token:
                self._ends[place + _TRUST] = 0.0
        self._look()

    def runs(self, queue: str) -> bool:
        """Whether a living process is inside a message of the queue."""
        pid = self._numbers[self._places[queue] + _PID]
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
        place = self._places[queue]
        until = self._ends[place + _TRUST]
        if self._numbers[place + _TOKEN] != token:
            self._refuse(queue, token)
        watch = self._watch or self._look_after_this_process()
        self._numbers[place + _PID] = watch.pid
        watch.running[queue] = token
        # Set to this very end of trust, most of the time, by the message before: had it come, this process
        # would not live.
        if watch.alarm_at != until or watch.is_foreign:
            if until <= self._clock.monotonic():
                self._refuse(queue, token)
            with watch.lock:
                watch.is_foreign = False
                _disarm_handlers()
                self._arm(watch)

    def end(self, queue: str) -> None:
        """It has ended, whatever its outcome."""
        watch = self._watch
        if watch is not None and watch.running.pop(queue, 0):
            if watch.running or watch.is_soon:
                with watch.lock:
                    self._arm(watch)
            self._numbers[self._places[queue] + _PID] = 0

    # -- inside

    def _look(self) -> None:
        """Where the main process runs the messages, it is told at once."""
        watch = self._watch
        if watch is not None and watch.running:
            with watch.lock:
                self._arm(watch)

    def _refuse(self, queue: str, token: int) -> None:
        logger.critical("A message of %r, token %d, is not run: its term is over.", queue, token)
        os.kill(os.getpid(), signal.SIGKILL)

    def disown(self) -> None:
        """Nothing runs in this child, as far as we know; a lock that was inherited may be held for ever."""
        self._is_child = True
        self._start_anew()

    def _start_anew(self) -> None:
        self._watch: _Watch | None = None
        self._making = unpatched("_thread", "allocate_lock")()

    def _look_after_this_process(self) -> _Watch:
        with self._making:
            if self._watch is None:
                # One per process, whichever thread is first: there is only one alarm.
                self._watch = _Watch()
                unpatched("_thread", "start_new_thread")(self._look_on, (self._watch,))
            return self._watch

    def _look_on(self, watch: _Watch) -> None:
        sleep = unpatched("time", "sleep")
        while True:
            watch.wait()
            while not watch.is_idle:
                # Before the look, not after: who has woken it has just set the alarm, and the interpreter is
                # free when the message is over, so that nothing would be found running, after each.
                left_s = watch.alarm_at - self._clock.monotonic()
                sleep(LOOK_S if self._is_child else min(max(left_s / 3, LOOK_S), MAIN_LOOK_S))
                with watch.lock:
                    self._arm(watch)
                    # Whoever begins next sees to that; only the main thread can.
                    watch.is_foreign = _is_handled()
                    watch.is_idle = watch.alarm_at == NEVER

    def _arm(self, watch: _Watch) -> None:
        """Set the alarm to the first end of trust of what runs, or switch it off; under the watch's lock."""
        # In this order: who begins now is seen below, or sees that nothing is set.
        watch.alarm_at = NEVER
        first = min((self._end_of(*each) for each in tuple(watch.running.items())), default=NEVER)
        left_s = first - self._clock.monotonic()
        signal.setitimer(signal.ITIMER_REAL, max(left_s, SHORTEST_S) if first < NEVER else 0.0)
        watch.is_soon = left_s < SOON_S
        watch.alarm_at = first
        if watch.is_idle and first < NEVER:
            watch.is_idle = False
            watch.wake()

    def _end_of(self, queue: str, token: int) -> float:
        place = self._places[queue]
        return self._ends[place + _TRUST] if self._numbers[place + _TOKEN] == token else 0.0


def _disarm_handlers() -> None:
    """See to it that the alarm kills: a handler in Python would wait for the interpreter, or forgive."""
    if _is_handled():
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        except ValueError:
            logger.critical(
                "Somebody handles SIGALRM in this process: what runs past its term is not killed."
            )


def _is_handled() -> bool:
    return signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL


def _forget_the_parents(guard: weakref.ref[Guard]) -> None:
    """In a child: what the parent runs, and the alarm for it, are the parent's."""
    this = guard()
    if this is not None:
        this.disown()


class _Watch:
    """What one process runs, and the thread that looks after it.

    A message begins and ends without the lock, most of the time: it says first that it runs, and looks at
    the alarm then, while who sets the alarm says first that there is none, and looks at what runs then.

    Attributes:
        running: the token of what runs, by queue.
        alarm_at: the end of trust that the alarm is set to; :data:`NEVER` when it is switched off.
        is_soon: the alarm goes off within :data:`SOON_S` of when it was set or looked at last.
        is_idle: the thread waits, because nothing ran when it looked.
        is_foreign: somebody has put a handler of his own in the place of ours.
        lock: held while the alarm is set.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.running: dict[str, int] = {}
        self.alarm_at = NEVER
        self.is_soon = False
        self.is_idle = True
        self.is_foreign = False
        self.lock = unpatched("_thread", "allocate_lock")()
        self._bell = unpatched("_thread", "allocate_lock")()
        self._bell.acquire()

    def wake(self) -> None:
        """Somebody runs, and the thread waits."""
        self._bell.release()

    def wait(self) -> None:
        """Wait until somebody runs."""
        self._bell.acquire()
