"""The thread that sends. It does I/O only: what it sends was made by the callers.

It is a native thread, also under gevent and eventlet, with a broker connection that nobody else uses. It
starts with the first message of a process and ends with :meth:`Flusher.stop`, or with the process.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from celery_dq.native import unpatched
from celery_dq.producer.buffer import Lane, Message
from celery_dq.producer.outbox import Outbox
from celery_dq.producer.sender import Refused, Sender, State, Unreachable

__all__ = ["Flusher", "Hooks", "Undelivered"]

logger = logging.getLogger(__name__)

#: Seconds between two looks for folders of dead processes.
ADOPT_S = 5.0
#: Seconds between two looks whether our own folder is still there.
TIDY_S = 1.0
#: Seconds after the last message during which the thread looks by itself, without being woken.
ACTIVE_S = 0.5
FIRST_DELAY_S = 0.05
LAST_DELAY_S = 2.0


class Undelivered(NamedTuple):
    """A message that will not be delivered from here.

    :param task_id: of the task.
    :param lane: where it should have gone.
    :param payload: what should have been sent.
    """

    task_id: str
    lane: str
    payload: bytes


class Hooks:
    """Functions to call from the flusher's thread. What they raise is logged and goes no further."""

    def __init__(self) -> None:
        self.on_delivered: list[Callable[[Sequence[str]], Any]] = []
        self.on_error: list[Callable[[BaseException, Undelivered, State], Any]] = []

    def delivered(self, batch: Sequence[Message]) -> None:
        """Tell which task ids the broker has now."""
        if self.on_delivered:
            ids = [each.id.decode("utf-8", "replace") for each in batch]
            for hook in list(self.on_delivered):
                _call(hook, ids)

    def failed(self, error: BaseException, lane: Lane, message: Message, state: State) -> None:
        """Tell about a message that will not be delivered from here."""
        undelivered = Undelivered(message.id.decode("utf-8", "replace"), lane.key, message.payload)
        for hook in list(self.on_error):
            _call(hook, error, undelivered, state)


def _call(hook: Callable[..., Any], *args: Any) -> None:
    try:
        hook(*args)
    except Exception:
        logger.exception("The hook %r failed; the buffer goes on.", hook)


class Flusher:
    """Sends what an outbox holds.

    :param outbox: of this process.
    :param sender: used by this thread only.
    :param hooks: told about what becomes of messages.
    """

    def __init__(self, outbox: Outbox, sender: Sender, hooks: Hooks) -> None:
        self.outbox = outbox
        self.hooks = hooks
        self._sender = sender
        self._now = outbox.clock.monotonic
        #: Let nothing linger until so many messages are delivered or rejected.
        self.hurry_to = 0
        #: Set while the broker does not answer: no lane is tried before.
        self.down_until = 0.0
        self.last_error = ""
        self._delay = FIRST_DELAY_S
        self._stopping = False
        self._adopted_at = self._tidied_at = float("-inf")
        self._busy_at = float("-inf")
        self._ended: Any = unpatched("_thread", "allocate_lock")()

    def start(self) -> None:
        """Start the thread. Raises RuntimeError where none can start any more (at exit)."""
        self._ended.acquire()
        try:
            unpatched("_thread", "start_new_thread")(self._run, ())
        except BaseException:
            self._ended.release()
            raise

    @property
    def settled(self) -> int:
        """How many messages are delivered or rejected."""
        counters = self.outbox.counters
        return counters.delivered + counters.rejected

    def hurry(self) -> None:
        """Send at once what is there now."""
        self.hurry_to = self.settled + self.outbox.buffer.pending
        self.outbox.ring()

    def stop(self, timeout: float) -> bool:
        """End the thread after what it is doing; whether it has ended in time."""
        self._stopping = True
        self.outbox.ring()
        deadline = time.monotonic() + timeout
        while not self._ended.acquire(False):
            if time.monotonic() >= deadline:
                return False
            # Patched by gevent and eventlet, so that other greenlets go on.
            time.sleep(0.001)
        self._ended.release()
        return True

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._sender.close()
            self._ended.release()

    def _turn(self) -> None:
        try:
            if not self.step():
                self._wait()
        except Exception:
            # This thread must not die of anything: messages would wait for ever.
            logger.exception("The flusher goes on after an error.")
            self.outbox.bell.acquire(True, FIRST_DELAY_S)

    def _wait(self) -> None:
        now = self._now()
        wait = self.outbox.doze(
            hurry=self.settled < self.hurry_to,
            recently=now - self._busy_at < ACTIVE_S,
            limit=max(self.down_until - now, 0.0) or ADOPT_S,
        )
        wait = max(wait, min(self.down_until - now, LAST_DELAY_S))
        if wait > 0:
            self.outbox.bell.acquire(True, wait)

    def step(self) -> bool:
        """Do one thing. False when there is nothing to do now."""
        now = self._now()
        if now - self._tidied_at >= TIDY_S:
            self._tidied_at = now
            self.outbox.tidy()
        if now - self._adopted_at >= ADOPT_S:
            self._adopted_at = now
            self.outbox.adopt()
        if now < self.down_until:
            return False
        lane = self.outbox.take(hurry=self.settled < self.hurry_to)
        if lane is None:
            return False
        self._busy_at = now
        self._send(lane)
        return True

    def _send(self, lane: Lane) -> None:
        try:
            self._sender.send(lane.key, lane.producer.hex(), lane.in_flight)
        except Refused as error:
            self._refused(lane, error)
        except Unreachable as error:
            if error.sent:
                self.hooks.delivered(self.outbox.done(lane, count=error.sent))
            self._down(error)
            self.outbox.failed(lane, 0.0)
        except Exception as error:
            delay = _delay(lane.failures)
            if not lane.failures:
                logger.warning("Lane %s is tried again in %.1f s: %r.", lane.key, delay, error)
            self.last_error = repr(error)
            self.outbox.failed(lane, delay)
        else:
            if self.last_error:
                logger.warning("The broker takes messages again; %d wait.", self.outbox.buffer.pending)
                self.last_error = ""
            self._delay = FIRST_DELAY_S
            self.hooks.delivered(self.outbox.done(lane))

    def _down(self, error: Unreachable) -> None:
        if not self.last_error:
            logger.warning("The broker does not answer, messages are kept: %s", error)
        self.last_error = str(error)
        delay = self._delay * random.uniform(0.75, 1.25)
        self._delay = min(self._delay * 2, LAST_DELAY_S)
        self.down_until = self._now() + delay

    def _refused(self, lane: Lane, error: Refused) -> None:
        if self.outbox.split(lane):
            self.outbox.failed(lane, 0.0)
            return
        message = lane.in_flight[0]
        journal = self.outbox.journal
        logger.error("Message %r of lane %s is refused: %s.", message.id, lane.key, error)
        if journal is not None:
            journal.reject(lane, message, str(error))
        self.outbox.done(lane, rejected=True)
        self.hooks.failed(error, lane, message, "rejected")


def _delay(failures: int) -> float:
    most: float = min(FIRST_DELAY_S * 2.0 ** min(failures, 20), LAST_DELAY_S)
    return most * random.uniform(0.75, 1.25)
