"""Kills the process that runs a message after the trust in its term has ended.

A leader that is stopped or cut off cannot be asked to stop its work. Therefore the work stops by itself.
While a message of a singleton queue runs, the kernel holds an alarm for the process that runs it: the pool's
child, or the worker if the pool has no processes. The alarm is set to the end of the term's trust.

The worker's main process moves the end of trust forward in shared memory, and a thread in the running process
sets the alarm again. In a worker without pool processes, both are the same process. Without a new end of
trust, SIGALRM ends the process. This works also for a process that was stopped and continues later, and for
one that never releases the interpreter.

The alarm stays set between two messages, because to disarm and arm it costs as much as a short task. The
thread disarms it when it finds no running message. Therefore the alarm may also end a process that is
stopped just after a message, for longer than its term is trusted. This holds for 0.05 s after a message, and
without pool processes for a second.

A task that uses ``signal.alarm`` or ``setitimer(ITIMER_REAL)`` itself cannot run on a singleton queue.
"""

from __future__ import annotations

import atexit
import mmap
import os
import signal
import weakref
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from celery_dq.clock import Clock, SystemClock
from celery_dq.native import start_thread, unpatched
from celery_dq.shown import shown_logger

__all__ = ["Guard"]

logger = shown_logger(__name__)

#: Words of 8 bytes per queue. The main process writes the end of trust (monotonic seconds), the token, and
#: the token of the last term that begins to end. The process that runs a message writes its process id, or 0.
_TRUST, _TOKEN, _ENDING, _PID, _WORDS = 0, 1, 2, 3, 4
#: Seconds between two checks of the end of trust.
LOOK_S = 0.05
#: Maximum seconds between two checks in the main process. It changes the end of trust itself, and each check
#: makes the interpreter switch threads during a message.
MAIN_LOOK_S = 1.0
#: Minimum seconds of the alarm; setitimer(0) would disarm it.
SHORTEST_S = 0.001
#: The end of a message disarms an alarm that goes off within these seconds, because the thread may be late.
SOON_S = 6 * LOOK_S
NEVER = float("inf")


class Guard:
    """The ends of trust of all singleton queues of one worker.

    Create it before the pool forks, so that its memory is shared.

    Args:
        queues: The names of all singleton queues.
        clock: Monotonic time.

    Attributes:
        current: The guard of this worker, also in the children of its pool; None in other processes.
    """

    current: ClassVar[Guard | None] = None

    def __init__(self, queues: Sequence[str], clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._places = {name: number * _WORDS for number, name in enumerate(sorted(queues))}
        memory = memoryview(mmap.mmap(-1, max(len(self._places), 1) * _WORDS * 8))
        # Two views of the same memory. Each word is written at once, so that no reader sees half of it.
        self._ends, self._numbers = memory.cast("d"), memory.cast("q")
        # Revoked tokens, in the main process only. A leader that hands over continues to renew its term until
        # its work has ended.
        self._revoked: dict[str, int] = {}
        self._deciding = unpatched("_thread", "allocate_lock")()
        self._is_child = False
        self._restart()
        # A comparison of process ids would cost a system call for every message.
        os.register_at_fork(after_in_child=partial(_forget_the_parents, weakref.ref(self)))

    # -- the main process

    def trust(self, queue: str, token: int, until: float) -> None:
        """Set the monotonic time until which a term is trusted; has no effect on a revoked term."""
        place = self._places[queue]
        with self._deciding:
            if token <= self._revoked.get(queue, 0):
                return
            if self._numbers[place + _TOKEN] != token:
                # A reader must never see the new token with the old end of trust, or the reverse.
                self._ends[place + _TRUST] = 0.0
                self._numbers[place + _TOKEN] = token
            self._ends[place + _TRUST] = until
        self._look()

    def revoke(self, queue: str, token: int) -> None:
        """End a term: a process that runs a message of it is killed within :data:`LOOK_S` seconds."""
        with self._deciding:
            self._revoked[queue] = max(self._revoked.get(queue, 0), token)
            place = self._places[queue]
            if self._numbers[place + _TOKEN] == token:
                self._ends[place + _TRUST] = 0.0
        self._look()

    def announce_end(self, queue: str, token: int) -> None:
        """Let the running message of a term know that the term ends."""
        self._numbers[self._places[queue] + _ENDING] = token

    def runs(self, queue: str) -> bool:
        """Whether a living process runs a message of the queue."""
        pid = self._numbers[self._places[queue] + _PID]
        if not pid:
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    # -- the process that runs the message

    def is_ending(self, queue: str, token: int) -> bool:
        """Whether the term of a message ends, or is not trusted any more."""
        place = self._places.get(queue)
        if place is None:
            return False
        if self._numbers[place + _TOKEN] != token or self._numbers[place + _ENDING] == token:
            return True
        return self._ends[place + _TRUST] <= self._clock.monotonic()

    def begin(self, queue: str, token: int) -> None:
        """Record that a message starts in this process; kill the process if the term is over."""
        place = self._places[queue]
        until = self._ends[place + _TRUST]
        if self._numbers[place + _TOKEN] != token:
            self._refuse(queue, token)
        watch = self._watch or self._look_after_this_process()
        self._numbers[place + _PID] = watch.pid
        watch.running[queue] = token
        # Mostly, an earlier message has set the alarm to the same end of trust. If that time had come, the
        # alarm would have killed this process.
        if watch.alarm_at != until or watch.is_foreign:
            if until <= self._clock.monotonic():
                self._refuse(queue, token)
            with watch.lock:
                watch.is_foreign = False
                _disarm_handlers()
                self._arm(watch)

    def end(self, queue: str) -> None:
        """Record that the message of this process has ended."""
        watch = self._watch
        if watch is not None and watch.running.pop(queue, 0):
            if watch.running or watch.is_soon:
                with watch.lock:
                    self._arm(watch)
            self._numbers[self._places[queue] + _PID] = 0

    # -- inside

    def _look(self) -> None:
        """Set the alarm at once if this process itself runs messages."""
        watch = self._watch
        if watch is not None and watch.running:
            with watch.lock:
                self._arm(watch)

    def _refuse(self, queue: str, token: int) -> None:
        logger.critical(
            "A message of queue %r, token %d, is not run, because its term is over; this process is killed.",
            queue,
            token,
            extra={"event": "guard_message_refused"},
        )
        os.kill(os.getpid(), signal.SIGKILL)

    def disown(self) -> None:
        """Reset the state in a forked child: no message runs in it, and an inherited lock may be held."""
        self._is_child = True
        self._restart()

    def _restart(self) -> None:
        self._watch: _Watch | None = None
        self._making = unpatched("_thread", "allocate_lock")()

    def _look_after_this_process(self) -> _Watch:
        with self._making:
            if self._watch is None:
                # One object per process, because a process has only one alarm.
                watch = _Watch()
                start_thread(self._look_on, watch)
                # The thread stops before the interpreter has ended, and the alarm would end the process then.
                atexit.register(self._disarm, watch)
                self._watch = watch
            return self._watch

    @staticmethod
    def _disarm(watch: _Watch) -> None:
        watch.running.clear()
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _look_on(self, watch: _Watch) -> None:
        sleep = unpatched("time", "sleep")
        while True:
            watch.wait()
            while not watch.is_idle:
                # Sleep before the check. The thread is woken when an alarm was just set. After a short
                # message, an immediate check would find no running message each time, and disarm the alarm.
                left_s = watch.alarm_at - self._clock.monotonic()
                sleep(LOOK_S if self._is_child else min(max(left_s / 3, LOOK_S), MAIN_LOOK_S))
                with watch.lock:
                    self._arm(watch)
                    # Only the main thread can remove a handler, so the next message does it.
                    watch.is_foreign = _is_handled()
                    watch.is_idle = watch.alarm_at == NEVER

    def _arm(self, watch: _Watch) -> None:
        """Set the alarm to the earliest end of trust of the running messages, or disarm it.

        The caller must hold the lock of `watch`.
        """
        # The order matters: a message that starts now is either seen below, or sees that no alarm is set.
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
    """Remove a Python handler of SIGALRM, which could run late or keep the process alive."""
    if _is_handled():
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        except ValueError:
            logger.critical(
                "Other code has installed a handler of SIGALRM in this process, and this thread cannot "
                "remove it; a message that runs after the end of its term is not killed. Remove the handler.",
                extra={"event": "guard_alarm_handled"},
            )


def _is_handled() -> bool:
    return signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL


def _forget_the_parents(guard: weakref.ref[Guard]) -> None:
    """Reset a guard in a forked child: running messages and the alarm belong to the parent."""
    this = guard()
    if this is not None:
        this.disown()


class _Watch:
    """The running messages of one process, and its alarm.

    Most messages start and end without the lock. A message first records that it runs, and then reads the
    alarm. The code that sets the alarm first records that there is none, and then reads the running messages.

    Attributes:
        running: The tokens of the running messages, by queue.
        alarm_at: The end of trust to which the alarm is set; :data:`NEVER` if it is disarmed.
        is_soon: Whether the alarm goes off within :data:`SOON_S` seconds of the last check.
        is_idle: Whether the thread waits, because no message ran at the last check.
        is_foreign: Whether other code has installed a handler of SIGALRM.
        lock: Held while the alarm is set.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.running: dict[str, int] = {}
        self.alarm_at = NEVER
        self.is_soon = False
        self.is_idle = True
        self.is_foreign = False
        self.lock = unpatched("_thread", "allocate_lock")()
        self._wake_event = unpatched("_thread", "allocate_lock")()
        self._wake_event.acquire()

    def wake(self) -> None:
        """Wake the thread, because a message runs."""
        self._wake_event.release()

    def wait(self) -> None:
        """Wait until a message runs."""
        self._wake_event.acquire()
