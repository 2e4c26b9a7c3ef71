"""Led queues on brokers that cannot refuse a stale token: redis://, amqp://, memory:// and others.

::

    not consumed ──term begins──▶ consumed ──term ends──▶ given back, the running one ends ──▶ not consumed

Such a broker does not know who leads. So the worker consumes a led queue only in its term, on a channel of
its own, looks at the term before each message, and starts one when the one before is over. Where a dead
worker's messages come back at once (AMQP) it is sent one ahead; where they come back late or behind others
(kombu's virtual transports) it gets one when it needs one, and asks again in a moment when there is none.
What a stopped or cut-off leader runs is ended by the guard, as everywhere.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from kombu import Consumer
from kombu.transport.virtual import Channel as VirtualChannel

from celery_dq.hooks import QUEUE, TOKEN, Terms

logger = logging.getLogger(__name__)

#: Seconds until the term is looked at again when it is in doubt, and the queue when it was empty.
LOOK_AGAIN_S = 0.1


class LedQueue:
    """One led queue in this worker.

    Attributes:
        source: what is asked for messages, or sends them; None while it is not consumed.
        token: of the term in which it is, or was, consumed.
        held: received, not begun.
        running: the message whose task runs or waits for its time.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.source: Any = None
        self.asks = False
        self.token = 0
        self.held: deque[Any] = deque()
        self.running: Any = None
        self.advancing = False
        self.looks = False
        self.spent: Any = None


class Sequencer:
    """Consumes the led queues of a worker in its terms; :class:`celery_dq.hooks.Consumption` to them.

    Arguments:
        consumer: Celery's consumer; its ``on_task_request`` is replaced.
        terms: says which queues are led, and when.
        names: the led queues of this worker.
    """

    def __init__(self, consumer: Any, terms: Terms, names: Iterable[str]) -> None:
        self._consumer = consumer
        self._terms = terms
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
        """Celery reconnects by itself, and its broker keeps what is not acknowledged."""
        return False

    # -- with the connection

    def start(self) -> None:
        """The connection is there, or there again."""
        if self._consumer.hub is not None:
            if self._bell is None:
                self._bell = socket.socketpair()
                for end in self._bell:
                    end.setblocking(False)
            self._consumer.hub.add_reader(self._bell[0], self._heard)
        self._look_soon()

    def stop(self) -> None:
        """The connection is gone or about to go: what was not begun is delivered anew."""
        for queue in self._queues.values():
            self._give_back(queue)
            self._close(queue)

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
            with contextlib.suppress(OSError):
                self._bell[1].send(b"1")
        else:
            self._consumer.call_soon(self.look)

    def _heard(self) -> None:
        if self._bell is not None:
            with contextlib.suppress(BlockingIOError):
                self._bell[0].recv(4096)
        self.look()

    def look(self) -> None:
        """Begin and cease to consume with the terms, and start what may start."""
        for queue in self._queues.values():
            token = self._terms.term(queue.name)
            if queue.source is not None and queue.token != token:
                self._give_back(queue)
                self._close(queue)
            if queue.spent is not None and queue.running is None:
                spent, queue.spent = queue.spent, None
                with contextlib.suppress(*self._consumer.connection_errors, *self._consumer.channel_errors):
                    spent.close()
            if token and queue.source is None and queue.running is None:
                self._open(queue, token)
            self._advance(queue)

    def _open(self, queue: LedQueue, token: int) -> None:
        connection = self._consumer.connection
        if connection is None:
            return  # start() looks again
        queue.token = token
        app = self._consumer.app
        channel = connection.channel()
        queue.asks = isinstance(channel, VirtualChannel)
        if queue.asks:
            queue.source = app.amqp.queues[queue.name](channel)
            queue.source.declare()
            return
        queue.source = Consumer(
            channel,
            [app.amqp.queues[queue.name]],
            on_message=lambda message: self._received(queue, message),
            accept=app.conf.accept_content,
        )
        queue.source.qos(prefetch_count=1)
        queue.source.consume()

    def _close(self, queue: LedQueue) -> None:
        """Consume no more; the channel stays for the acknowledgement of what runs, which may take long."""
        source, queue.source = queue.source, None
        if source is not None:
            with contextlib.suppress(*self._consumer.connection_errors, *self._consumer.channel_errors):
                if not queue.asks:
                    source.cancel()
            queue.spent = source.channel

    def _give_back(self, queue: LedQueue) -> None:
        while queue.held:
            with contextlib.suppress(*self._consumer.connection_errors, *self._consumer.channel_errors):
                queue.held.pop().requeue()

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
                queue.running = message
                message.headers[TOKEN], message.headers[QUEUE] = queue.token, queue.name
                self._consumer.task_consumer.on_message(message)
                if message.acknowledged and not getattr(message, "dq_taken", False):
                    self._over(queue, message)  # it came to no task: unknown, expired, revoked
        finally:
            queue.advancing = False

    def _next(self, queue: LedQueue) -> Any:
        """The next message that may start now."""
        message = None
        if self._terms.stands(queue.name, queue.token):
            if queue.held:
                return queue.held.popleft()
            if queue.asks:
                message = queue.source.get(accept=self._consumer.app.conf.accept_content)
        if message is None and (queue.asks or queue.held) and not queue.looks:
            queue.looks = True
            self._consumer.timer.call_after(LOOK_AGAIN_S, self._look_again, (queue,))
        return message

    def _look_again(self, queue: LedQueue) -> None:
        queue.looks = False
        if self._consumer.pool.is_green:
            self._advance(queue)
        else:
            self._look_soon()

    def take(self, request: Any) -> Any:
        """Stand between the consumer and the pool."""
        message = request.message
        queue = next((each for each in self._queues.values() if each.running is message), None)
        if queue is None:
            # Inherited by a retry, or forged: only who leads writes these two.
            for headers in (message.headers, request.request_dict):
                if headers.pop(QUEUE, None) is not None:
                    headers.pop(TOKEN, None)
            return self._run(request)
        message.dq_taken = True
        request.request_dict[TOKEN], request.request_dict[QUEUE] = queue.token, queue.name
        self._tell_when_over(request, queue, message)
        try:
            return self._run(request)
        finally:
            if getattr(request, "_already_revoked", False):
                self._over(queue, message)

    def _tell_when_over(self, request: Any, queue: LedQueue, message: Any) -> None:
        def then_over(handler: Callable[..., Any]) -> Callable[..., Any]:
            def handle(*args: Any, **options: Any) -> Any:
                try:
                    return handler(*args, **options)
                finally:
                    self._over(queue, message)

            return handle

        timeout = request.on_timeout

        def on_timeout(soft: bool, limit: float) -> Any:
            try:
                return timeout(soft, limit)
            finally:
                if not soft:
                    self._over(queue, message)

        request.on_success = then_over(request.on_success)
        request.on_failure = then_over(request.on_failure)
        request.on_timeout = on_timeout

    def _over(self, queue: LedQueue, message: Any) -> None:
        if queue.running is not message:
            return
        queue.running = None
        if self._consumer.pool.is_green:
            # In the same thread, and a turn of the loop may be seconds away.
            self._advance(queue)
        elif not queue.advancing:
            self._look_soon()
