"""The thread that sends buffered messages. It does I/O only: the callers have built the messages.

It is a native thread, also under gevent and eventlet, with its own broker connection. It starts with the
first message of a process and ends with :meth:`Flusher.stop`, or with the process.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from celery_dq.errors import DQError, QueueFull, described
from celery_dq.lost_attempts import LostAttempts
from celery_dq.native import leave_green_hub, start_thread, unpatched
from celery_dq.producer.buffer import BufferedMessage, Lane
from celery_dq.producer.message_store import MessageStore
from celery_dq.producer.sender import (
    BrokerUnreachable,
    PublishDeferred,
    PublishInterrupted,
    PublishRefused,
    Refusal,
    Sender,
    State,
)
from celery_dq.shown import shown_logger

__all__ = ["Flusher", "DeliveryCallbacks", "Undelivered"]

logger = shown_logger(__name__)

#: Seconds between two searches for folders of dead processes.
ADOPT_S = 5.0
#: Seconds between two checks that the folder of this process still exists.
TIDY_S = 1.0
#: Seconds after the last message during which the thread polls instead of waiting for a wake-up.
ACTIVE_S = 0.5
#: Shortest and longest delay in seconds before a failed batch is sent again.
FIRST_DELAY_S = 0.05
LAST_DELAY_S = 2.0


class Undelivered(NamedTuple):
    """A message that this process will not deliver.

    Attributes:
        task_id: Id of the task.
        lane: Destination, in the form that the sender uses.
        payload: Packed message, in the form that the sender uses.
    """

    task_id: str
    lane: str
    payload: bytes


class DeliveryCallbacks:
    """Callbacks that run in the flusher thread. Their exceptions are logged and not raised.

    Attributes:
        on_delivered: Called with the task ids of each delivered batch.
        on_error: Called with the error, the message and its state, for a message that will not be delivered.
    """

    def __init__(self) -> None:
        self.on_delivered: list[Callable[[Sequence[str]], Any]] = []
        self.on_error: list[Callable[[BaseException, Undelivered, State], Any]] = []

    def delivered(self, batch: Sequence[BufferedMessage]) -> None:
        """Report the task ids of a delivered batch."""
        if self.on_delivered:
            ids = [each.id.decode("utf-8", "replace") for each in batch]
            for hook in list(self.on_delivered):
                _call(hook, ids)

    def failed(self, error: BaseException, lane: Lane, message: BufferedMessage, state: State) -> None:
        """Report a message that this process will not deliver."""
        undelivered = Undelivered(message.id.decode("utf-8", "replace"), lane.key, message.payload)
        for hook in list(self.on_error):
            _call(hook, error, undelivered, state)


def _call(hook: Callable[..., Any], *args: Any) -> None:
    try:
        hook(*args)
    except Exception:
        logger.exception(
            "Callback %r of the buffer raised an exception; delivery continues.",
            hook,
            extra={"event": "buffer_hook_failed"},
        )


class Flusher:
    """Sends the messages of a message store.

    Args:
        message_store: The message store of this process.
        sender: Used by this thread only.
        hooks: Callbacks for delivered and failed messages.

    Attributes:
        down_until: Monotonic time before which no lane is tried, because the broker does not answer.
        last_error: Error of the last failed batch; "" after a delivered one.
        looked: Number of the last finished search for folders of dead processes.
    """

    def __init__(self, message_store: MessageStore, sender: Sender, hooks: DeliveryCallbacks) -> None:
        self.message_store = message_store
        self.hooks = hooks
        self._sender = sender
        self._now = message_store.clock.monotonic
        self.down_until = 0.0
        #: Class of the last unexpected error; None after a round without one.
        self._stumbled: type[Exception] | None = None
        self.last_error = ""
        self._is_down = False
        #: Producer sequences of the lanes whose last batch the broker did not accept.
        self._deferred: set[bytes] = set()
        #: Destinations whose last batches had messages for which a tenant had no room.
        self._refusing: set[str] = set()
        #: By producer sequence: the attempts whose connections were closed.
        self._losses: dict[bytes, LostAttempts] = {}
        self._delay = FIRST_DELAY_S
        self._stopping = False
        #: Number of the last search that a caller asked for.
        self._looks_asked = self.looked = 0
        self._look_tried = 0
        self._adopted_at = self._tidied_at = float("-inf")
        self._busy_at = float("-inf")
        #: Held until the thread has ended.
        self._ended: Any = unpatched("_thread", "allocate_lock")()
        self._ended.acquire()

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: No thread can start any more, because the interpreter ends.
        """
        try:
            start_thread(self._run)
        except BaseException:
            self._ended.release()
            raise

    @property
    def runs(self) -> bool:
        """Whether the thread may still send; False once it has ended, or could not start."""
        return bool(self._ended.locked())

    def flush_soon(self) -> None:
        """Send all messages in the buffer without linger. Does not wait."""
        with self.message_store.lock:
            self.message_store.buffer.flush_soon()
        self.message_store.wake()

    def look_for_orphans(self) -> int:
        """Ask for a search for folders of dead processes.

        Returns:
            The number of the search; it is over when :attr:`looked` has reached that number.
        """
        with self.message_store.lock:
            self._looks_asked += 1
            asked = self._looks_asked
        self.message_store.wake()
        return asked

    def stop(self, timeout: float) -> bool:
        """End the thread after its current step.

        Args:
            timeout: Seconds to wait for its end.

        Returns:
            Whether the thread ended in time.
        """
        self._stopping = True
        self.message_store.wake()
        deadline = time.monotonic() + timeout
        while not self._ended.acquire(False):
            if time.monotonic() >= deadline:
                return False
            # gevent and eventlet patch this sleep, so other greenlets run meanwhile.
            time.sleep(0.001)
        self._ended.release()
        return True

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        finally:
            try:
                self._sender.close()
                leave_green_hub()
                self.message_store.close()
            finally:
                self._ended.release()

    def _turn(self) -> None:
        try:
            if not self.step():
                self.wait()
        except Exception as error:
            # Without this thread no message would be sent any more.
            if type(error) is not self._stumbled:
                logger.exception(
                    "The flusher thread continues after an error; messages stay in the buffer.",
                    extra={"event": "buffer_flusher_error"},
                )
            self._stumbled = type(error)
            self.message_store.wakeup.acquire(True, FIRST_DELAY_S)
        else:
            self._stumbled = None

    def wait(self) -> None:
        """Wait until a batch may be due, or the store is woken; at most for a few seconds."""
        now = self._now()
        wait = self.message_store.sleep_until_due(
            recently=now - self._busy_at < ACTIVE_S,
            limit=max(self.down_until - now, 0.0) or ADOPT_S,
        )
        wait = max(wait, min(self.down_until - now, LAST_DELAY_S))
        if wait > 0:
            self.message_store.wakeup.acquire(True, wait)

    def step(self) -> bool:
        """Do the housekeeping that is due, and send one batch.

        Returns:
            Whether a batch was sent or tried.
        """
        now = self._now()
        if now - self._tidied_at >= TIDY_S:
            self._tidied_at = now
            self.message_store.tidy()
        asked = self._looks_asked
        if now - self._adopted_at >= ADOPT_S or asked > self._look_tried:
            self._adopted_at, self._look_tried = now, asked
            self.message_store.adopt()
            self.looked = asked
        if now < self.down_until:
            return False
        lane = self.message_store.take()
        if lane is None:
            return False
        self._busy_at = now
        self._send(lane)
        return True

    def _send(self, lane: Lane) -> None:
        try:
            refusals = self._sender.send(lane.key, lane.producer.hex(), lane.in_flight)
        except PublishRefused as error:
            self._refused(lane, error)
        except BrokerUnreachable as error:
            if error.sent:
                self._losses.pop(lane.producer, None)
                self.hooks.delivered(self.message_store.done(lane, count=error.sent))
            if isinstance(error, PublishInterrupted):
                self._interrupted(lane, error)
            elif isinstance(error, PublishDeferred):
                self._later(lane, error)
            else:
                self._down(error)
                self.message_store.failed(lane, 0.0)
        except Exception as error:
            self._later(lane, error)
        else:
            if self._is_down:
                logger.warning(
                    "The broker accepts messages again; buffered messages to send: %d.",
                    self.message_store.buffer.pending,
                    extra={"event": "buffer_delivery_resumed"},
                )
            self._is_down, self.last_error = False, ""
            self._delay = FIRST_DELAY_S
            self._losses.pop(lane.producer, None)
            self._settle(lane, refusals)

    def _settle(self, lane: Lane, refusals: Sequence[Refusal]) -> None:
        """Settle the batch in flight, of which the broker has all messages but those that it refused."""
        if not refusals:
            self._refusing.discard(lane.key)
        settled = 0
        for place, error, waits in refusals:
            if place > settled:
                self.hooks.delivered(self.message_store.done(lane, count=place - settled))
            if waits:
                # The messages behind it wait, too, so that the lane keeps its order.
                self._later(lane, error)
                return
            if not self._reject(lane, error):
                return  # the broker recognises the messages behind it when they are sent again
            settled = place + 1
        self._deferred.discard(lane.producer)
        if lane.in_flight:
            self.hooks.delivered(self.message_store.done(lane))

    def _later(self, lane: Lane, error: Exception) -> None:
        delay = _delay(lane.failures)
        if lane.producer not in self._deferred:
            self._deferred.add(lane.producer)
            logger.warning(
                "A batch of lane %s was not accepted (will retry in %.1f s): %s",
                lane.key,
                delay,
                described(error),
                extra={"event": "buffer_lane_deferred"},
            )
        self.last_error = described(error)
        self.message_store.failed(lane, delay, self._now() - self._busy_at)

    def _interrupted(self, lane: Lane, error: PublishInterrupted) -> None:
        """Send the batch again, at last in halves, until one message alone has lost each of its attempts."""
        losses = self._losses.setdefault(lane.producer, LostAttempts())
        if losses.lost():
            del self._losses[lane.producer]
            reason = f"{error}. Each of {losses.count} attempts ended so, and other commands were answered"
            self._refused(lane, PublishRefused(reason))
            return
        if losses.count > 1 and self.message_store.split(lane):
            losses.broker_failed()
        self.message_store.failed(lane, losses.pause_s)

    def _down(self, error: BrokerUnreachable) -> None:
        self._losses.clear()
        if not self._is_down:
            logger.warning(
                "The broker does not answer; buffered messages (%d) are kept and sent later: %s",
                self.message_store.buffer.pending,
                error,
                extra={"event": "buffer_broker_unreachable"},
            )
        self._is_down, self.last_error = True, str(error)
        delay = self._delay * random.uniform(0.75, 1.25)
        self._delay = min(self._delay * 2, LAST_DELAY_S)
        self.down_until = self._now() + delay

    def _refused(self, lane: Lane, error: PublishRefused) -> None:
        if self.message_store.split(lane):
            self.message_store.failed(lane, 0.0)
            return
        self._reject(lane, error)

    def _reject(self, lane: Lane, error: DQError) -> bool:
        """Settle the first message in flight, which the broker refused; return False if it cannot be kept."""
        message = lane.in_flight[0]
        try:
            kept = self.message_store.reject(lane, message, error)
        except OSError as problem:
            self._later(lane, problem)
            return False
        is_full = isinstance(error, QueueFull)
        if not is_full or lane.key not in self._refusing:
            logger.error(
                "The broker refused message %r of lane %s: %s. It is not sent again%s%s.",
                message.id,
                lane.key,
                error,
                f" and is kept as {kept}" if kept else "",
                "; the next such messages of the lane are not logged" if is_full else "",
                extra={"event": "buffer_message_refused"},
            )
            if is_full:
                self._refusing.add(lane.key)
        self._deferred.discard(lane.producer)
        self.message_store.done(lane, rejected=True, count=1)
        self.hooks.failed(error, lane, message, "rejected")
        return True


def _delay(failures: int) -> float:
    most: float = min(FIRST_DELAY_S * 2.0 ** min(failures, 20), LAST_DELAY_S)
    return most * random.uniform(0.75, 1.25)
