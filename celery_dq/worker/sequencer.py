"""Led queues on brokers that cannot refuse a stale token: redis://, amqp://, memory:// and others.

::

    not consumed ──term begins──▶ consumed ──term ends──▶ given back, the running one ends ──▶ not consumed
                                    │  ▲
                     connection lost▼  │connected anew, and what the pool had is over
                                  not consumed

Such a broker does not know who leads. So the worker consumes a led queue only in its term, on a channel of
its own, looks at the term before each message, and starts one when the one before is over. Where a dead
worker's messages come back at once (AMQP) it is sent one ahead; where they come back late or behind others
(kombu's virtual transports) it gets one when it needs one, and asks again in a moment when there is none.
How far a message has come, and what becomes of it when the term or the connection ends, is told in
:mod:`celery_dq.worker.led_message`. What a stopped or cut-off leader runs is ended by the guard, as
everywhere.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from celery.concurrency.solo import TaskPool as SoloPool
from kombu import Consumer
from kombu.transport.virtual import Channel as VirtualChannel

from celery_dq.clock import Clock
from celery_dq.hooks import QUEUE, TOKEN, Terms
from celery_dq.worker.led_message import LedMessage
from celery_dq.worker.stopping import stops

logger = logging.getLogger(__name__)

#: Seconds until the term is looked at again when it is in doubt, and the queue when it was empty.
LOOK_AGAIN_S = 0.1
#: What the bell is rung for: to look at the queues, or only to hear whether somebody is there.
LOOK, PING = b"1", b"?"
#: Seconds until a broker is asked again that has answered with an error.
LOOK_AFTER_ERROR_S = 1.0


class LedQueue:
    """One led queue in this worker.

    Attributes:
        source: what is asked for messages, or sends them; None while it is not consumed.
        token: of the term in which it is, or was, consumed.
        held: received, not begun.
        running: the message whose turn it is: its task runs, or waits for something.
        looks: a look at it is due, by the timer's entry `alarm`.
        asked_at: since when the broker owes an answer, in monotonic seconds; None when it does not.
        spent: a channel that nothing comes from any more; it stays for the acknowledgement of what runs.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.source: Any = None
        self.asks = False
        self.token = 0
        self.held: deque[Any] = deque()
        self.running: LedMessage | None = None
        self.advancing = False
        self.looks = False
        self.alarm: Any = None
        self.asked_at: float | None = None
        self.spent: Any = None
        # The term that was asked last whether it is cut off, and since when it is asked.
        self.judged = 0
        self.judged_at = 0.0


class Sequencer:
    """Consumes the led queues of a worker in its terms; :class:`celery_dq.hooks.Consumption` to them.

    Arguments:
        consumer: Celery's consumer; its ``on_task_request`` is replaced.
        terms: says which queues are led, and when.
        names: the led queues of this worker.
        lease_s: for how long the broker may be silent before another worker is to lead, in seconds.
        clock: monotonic time, for that.
    """

    def __init__(
        self, consumer: Any, terms: Terms, names: Iterable[str], lease_s: float, clock: Clock
    ) -> None:
        self._consumer = consumer
        self._terms = terms
        self._lease_s = lease_s
        self._clock = clock
        #: Since when the connection is lost, and since when the loop has not heard the bell.
        self._lost_at: float | None = None
        self._rung_at: float | None = None
        self._queues = {name: LedQueue(name) for name in names}
        self._bell: tuple[socket.socket, socket.socket] | None = None
        self._run: Callable[[Any], Any] = consumer.on_task_request
        consumer.on_task_request = self.take
        for name in self._queues:
            terms.attach(name, self)
        terms.listen(self._look_soon)

    # -- what the terms ask, from any thread

    def busy(self, name: str, token: int) -> bool:
        """Whether something of that term is held or runs."""
        queue = self._queues[name]
        return queue.token == token and (queue.running is not None or bool(queue.held))

    def cut_off(self, name: str, token: int) -> bool:
        """Whether the broker has been silent for a whole lease, all of it in that term.

        It is when the connection is lost, when it owes the queue an answer, and when Celery's loop turns no
        more: nothing else than a question to the broker holds it for so long.
        """
        if stops():
            return False  # it hands over by itself, and there is no loop any more
        queue = self._queues[name]
        now = self._clock.monotonic()
        if token != queue.judged:
            # Who is elected again although it is cut off leads for a lease, not for a moment: nobody else may
            # be there, and a term is not to be had for nothing.
            queue.judged, queue.judged_at = token, now
        if self._rung_at is None and self._may_ring():
            self._rung_at = now
            self._ring(PING)
        silent = [since for since in (self._lost_at, self._rung_at, queue.asked_at) if since is not None]
        return bool(silent) and now - max(min(silent), queue.judged_at) >= self._lease_s

    def _may_ring(self) -> bool:
        # A solo pool runs its tasks in the loop.
        return self._bell is not None and not isinstance(self._consumer.pool, SoloPool)

    # -- with the connection

    def start(self) -> None:
        """The connection is there, or there again."""
        self._lost_at = self._rung_at = None
        if self._consumer.hub is not None:
            if self._bell is None:
                self._bell = socket.socketpair()
                for end in self._bell:
                    end.setblocking(False)
            self._consumer.hub.add_reader(self._bell[0], self._heard)
        self._look_soon()

    def stop(self) -> None:
        """The connection is gone or about to go: what the pool has not got is delivered anew."""
        ends = stops()
        if not ends:
            self._lost_at = self._clock.monotonic()
        for queue in self._queues.values():
            # Celery 5.5 drops all that its timer has: a look that is due would never come.
            if queue.looks:
                self._consumer.timer.cancel(queue.alarm)
                queue.looks = False
            self._close(queue)
            self._give_back(queue, requeue=ends, parked=True)

    def flushed(self, kept: frozenset[int]) -> None:
        """After a lost connection, or at the end, the pool has forgotten its jobs but these."""
        for queue in self._queues.values():
            if queue.running is not None:
                with contextlib.suppress(*self._consumer.connection_errors, *self._consumer.channel_errors):
                    queue.running.flushed(kept, requeue=stops())

    def close(self) -> None:
        """The worker ends."""
        self._terms.unlisten(self._look_soon)
        if self._bell is not None:
            if self._consumer.hub is not None:
                self._consumer.hub.remove_reader(self._bell[0])
            for end in self._bell:
                end.close()
            self._bell = None

    def _look_soon(self) -> None:
        """From any thread: look in the consumer's own."""
        if self._bell is not None:
            self._ring(LOOK)
        else:
            self._consumer.call_soon(self.look)

    def _ring(self, what: bytes) -> None:
        if self._bell is not None:
            with contextlib.suppress(OSError):
                self._bell[1].send(what)

    def _heard(self) -> None:
        rung = b""
        if self._bell is not None:
            with contextlib.suppress(BlockingIOError):
                rung = self._bell[0].recv(4096)
        self._rung_at = None
        if LOOK in rung:
            self.look()

    def look(self) -> None:
        """Begin and cease to consume with the terms, and start what may start."""
        for queue in self._queues.values():
            token = self._terms.term(queue.name)
            if queue.source is not None and queue.token != token:
                # In this order: what is over lets the next one begin.
                self._close(queue)
                self._give_back(queue)
            if queue.spent is not None and queue.running is None and queue.asked_at is None:
                spent, queue.spent = queue.spent, None
                with contextlib.suppress(*self._consumer.connection_errors, *self._consumer.channel_errors):
                    spent.close()
            if token and queue.source is None and queue.running is None:
                try:
                    self._open(queue, token)
                except Exception as error:
                    if self._is_celerys(queue, error):
                        raise
                    self._look_after_error(queue, error)
            self._advance(queue)

    def _open(self, queue: LedQueue, token: int) -> None:
        connection = self._consumer.connection
        if connection is None:
            return  # start() looks again
        queue.token = token
        app = self._consumer.app
        channel = connection.channel()
        try:
            queue.asks = isinstance(channel, VirtualChannel)
            if queue.asks:
                source = app.amqp.queues[queue.name](channel)
                source.declare()
            else:
                source = Consumer(
                    channel,
                    [app.amqp.queues[queue.name]],
                    on_message=lambda message: self._received(queue, message),
                    accept=app.conf.accept_content,
                )
                source.qos(prefetch_count=1)
                source.consume()
        except BaseException:
            queue.spent = channel
            raise
        queue.source = source

    def _close(self, queue: LedQueue) -> None:
        """Consume no more; the channel stays for the acknowledgement of what runs, which may take long."""
        source, queue.source = queue.source, None
        if source is not None:
            with contextlib.suppress(*self._consumer.connection_errors, *self._consumer.channel_errors):
                if not queue.asks:
                    source.cancel()
            queue.spent = source.channel

    def _give_back(self, queue: LedQueue, *, requeue: bool = True, parked: bool = False) -> None:
        errors = (*self._consumer.connection_errors, *self._consumer.channel_errors)
        running = queue.running
        # Who has it parked has been told to let go when the connection ends, and lets go in its turn else.
        if running is not None and (parked or not running.is_elsewhere):
            with contextlib.suppress(*errors):
                running.give_back(self._consumer.pool, requeue=requeue)
        while queue.held:
            message = queue.held.pop()
            if requeue:
                with contextlib.suppress(*errors):
                    message.requeue()

    # -- one message after the other

    def _received(self, queue: LedQueue, message: Any) -> None:
        queue.held.append(message)
        self._advance(queue)

    def _advance(self, queue: LedQueue) -> None:
        if queue.advancing:
            return  # a pool that runs its tasks at once calls this from inside
        queue.advancing = True
        try:
            while queue.source is not None and queue.running is None:
                message = self._next(queue)
                if message is None:
                    return
                token = queue.token
                queue.running = LedMessage(
                    message,
                    queue.name,
                    token,
                    partial(self._terms.stands, queue.name, token),
                    partial(self._over, queue),
                )
                self._consumer.task_consumer.on_message(message)
        except Exception as error:
            # An error in Celery's own handling of a message ends its worker, too.
            if self._is_celerys(queue, error) or (
                self._consumer.hub is not None and queue.running is not None
            ):
                raise
            self._give_back(queue)
            self._look_after_error(queue, error)
        finally:
            queue.advancing = False

    def _next(self, queue: LedQueue) -> Any:
        """The next message that may start now."""
        if queue.asks and not queue.held and self._terms.stands(queue.name, queue.token):
            self._ask(queue)
        if queue.held and self._terms.stands(queue.name, queue.token):
            return queue.held.popleft()
        if queue.source is not None and (queue.asks or queue.held):
            self._look_later(queue, LOOK_AGAIN_S)
        return None

    def _ask(self, queue: LedQueue) -> None:
        """Get a message from a broker that sends none. The term and the connection may end meanwhile."""
        source = queue.source
        queue.asked_at = self._clock.monotonic()
        try:
            message = source.get(accept=self._consumer.app.conf.accept_content)
        finally:
            queue.asked_at = None
        if message is not None:
            queue.held.append(message)
            if queue.source is not source:
                self._give_back(queue)
        if queue.source is not source:
            self._look_soon()  # its channel was not closed

    def _is_celerys(self, queue: LedQueue, error: Exception) -> bool:
        """Whether Celery's loop is to hear of it: it makes a new connection, after which start() looks.

        What AMQP refuses (a queue that was declared otherwise) it refuses for ever, and Celery's worker ends.
        One of kombu's virtual transports may only be without its master, or loading.
        """
        if self._consumer.hub is None:
            return False  # nobody would hear of it
        return not queue.asks or isinstance(error, self._consumer.connection_errors)

    def _look_after_error(self, queue: LedQueue, error: Exception) -> None:
        logger.error("The led queue %r waits for its broker.", queue.name, exc_info=error)
        self._look_later(queue, LOOK_AFTER_ERROR_S)

    def _look_later(self, queue: LedQueue, pause_s: float) -> None:
        if not queue.looks:
            queue.looks = True
            queue.alarm = self._consumer.timer.call_after(pause_s, self._look_again, (queue,))

    def _look_again(self, queue: LedQueue) -> None:
        queue.looks = False
        if self._consumer.pool.is_green and queue.source is not None:
            self._advance(queue)
        else:
            self._look_soon()

    def take(self, request: Any) -> Any:
        """Stand between the consumer and the pool."""
        led: LedMessage | None = getattr(request.message, "dq_led", None)
        if led is None:
            # Inherited by a retry, or forged: only who leads writes these two.
            for headers in (request.message.headers, request.request_dict):
                if headers.pop(QUEUE, None) is not None:
                    headers.pop(TOKEN, None)
        elif not led.take(request):
            return None
        return self._run(request)

    def _over(self, queue: LedQueue, led: LedMessage) -> None:
        if queue.running is not led:
            return
        queue.running = None
        if self._consumer.pool.is_green and queue.source is not None:
            # In the same thread, and a turn of the loop may be seconds away.
            self._advance(queue)
        else:
            self._look_soon()
