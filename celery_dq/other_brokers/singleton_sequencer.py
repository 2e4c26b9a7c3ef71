"""Singleton queues on brokers that cannot refuse a stale token: redis://, amqp://, memory:// and others.

::

    not consumed ──term begins──▶ consumed ──term ends──▶ released; the running one ends ──▶ not consumed
                                    │  ▲
                     connection lost▼  │connected again, and the pool's messages are over
                                  not consumed

Such a broker does not know the leader. So the worker consumes a singleton queue only in its term, on a
separate channel. It checks the term before each message, and starts a message when the one before is over.
Where a dead worker's messages return at once (AMQP), the broker sends messages ahead. Where they return
late, or behind others (kombu's virtual transports), the worker fetches a message when it needs one, and
polls an empty queue. The guard ends the running task of a stopped or cut-off leader, as on every broker.

One message goes this way through Celery::

    with Celery ──the pool takes it──▶ in the pool ──its end──────────▶ over
         │  waits for its time, its rate,      └──the pool forgot it──▶ over
         │  its dedup key, a slot
         ├──acknowledged or rejected: it came to no task──────────────▶ over
         ├──declined: it waits for the result of another call─────────▶ over
         └──its term or its connection has ended──▶ released ─────────▶ over

The next message begins when this one is over, so each path must end there. Celery keeps the request of a
released message: a timer, or a slot that gets free, passes it to the pool later, where it is refused.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from celery.concurrency.solo import TaskPool as SoloPool
from celery.exceptions import TaskRevokedError
from celery.worker import state
from kombu import Consumer
from kombu.transport.redis import Channel as RedisChannel
from kombu.transport.virtual import Channel as VirtualChannel

from celery_dq.clock import Clock, SystemClock
from celery_dq.context import AppContext
from celery_dq.errors import DQError
from celery_dq.options.sections import Options, SingletonOptions
from celery_dq.outage import Outage
from celery_dq.protocols import QUEUE_HEADER, TOKEN_HEADER, Leaderships
from celery_dq.shown import shown_logger
from celery_dq.singleton.leaderships import WorkerLeaderships
from celery_dq.waker import Waker
from celery_dq.worker.singleton import SingletonStep
from celery_dq.worker.task_events import TaskSubscriber, stops, task_events

logger = shown_logger(__name__)


class CoveringRun:
    """A run, and whether it has taken place.

    Attributes:
        task: the task id.
        key: the dedup key, with the queue in front.
        is_over: the run has begun and ended.
    """

    def __init__(self, task: str, key: str) -> None:
        self.task = task
        self.key = key
        self.is_over = False


class SingletonMessage:
    """The message of a singleton queue that may run now.

    Args:
        message: kombu's message.
        queue: the name of the singleton queue.
        token: the fencing token of the term in which it may run.
        stands: returns whether a message may start in that term.
        over: called once, from any thread of the pool, when the message is over.
        behind: returns the headers of the messages that wait behind it.

    Attributes:
        message: kombu's message, whose attribute ``dq_singleton_message`` is this object.
        token: the fencing token of the term in which it may run.
        behind: returns the headers of the messages that wait behind it.
        run: its run, which covers calls behind it; None without a dedup key.
        asks: a dedup lock was requested for it; the dedup locks of the worker keep it until it gets the lock.
        in_pool: the pool has it, and reports its end.
        is_over: the next message may begin.
    """

    def __init__(
        self,
        message: Any,
        queue: str,
        token: int,
        stands: Callable[[], bool],
        over: Callable[[SingletonMessage], None],
        behind: Callable[[], Iterable[Mapping[str, Any]]] = tuple,
    ) -> None:
        self.message = message
        self.token = token
        self.behind = behind
        self.run: CoveringRun | None = None
        self.asks = False
        self.in_pool = False
        self.is_over = False
        self._is_released = False
        self._queue = queue
        self._stands = stands
        self._notify = over
        self._request: Any = None
        message.dq_singleton_message = self
        message.headers[TOKEN_HEADER], message.headers[QUEUE_HEADER] = token, queue
        # Celery acknowledges or rejects an unknown, expired, revoked or declined message, mostly in a later
        # turn of its loop. Only the message's own methods show that moment.
        message.ack, message.reject = self._then_over(message.ack), self._then_over(message.reject)

    def _then_over(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        def answer_then_over(*args: Any, **options: Any) -> Any:
            if self._is_released:
                return None  # a late answer of Celery: the broker has the message again
            try:
                return answer(*args, **options)
            finally:
                if not self.in_pool:
                    self.end()

        return answer_then_over

    @property
    def is_elsewhere(self) -> bool:
        """Whether it waits for its dedup lock; releasing it now would lose the place of its task."""
        return self.asks and self._request is None

    # -- to the pool

    def take(self, request: Any) -> bool:
        """Give a request the token on its way to the pool, and return whether it may continue."""
        if self.is_over:
            _forget(request)
            return False
        self._request = request
        request.request_dict[TOKEN_HEADER], request.request_dict[QUEUE_HEADER] = self.token, self._queue
        return True

    def enter_pool(self) -> None:
        """Note that the pool gets the message.

        Raises:
            TaskRevokedError: the message is over, or its term is.
        """
        if self.is_over or not self._stands():
            raise TaskRevokedError(self._request.id)
        self.in_pool = True

    def refused(self) -> None:
        """Note that the pool does not get the message: its task is revoked, or its term has ended."""
        if self.is_over:
            return
        if self._request._already_revoked:
            self.end()
        else:
            # Its term has ended while it waited. By now its dedup lock is released.
            self._return(requeue=True)

    # -- its end

    def end(self) -> None:
        """Note that the message is over."""
        if not self.is_over:
            self.is_over = True
            self._notify(self)

    def release(self, refuse: Callable[[Any], None], *, requeue: bool) -> None:
        """Release the message before the pool has it.

        Args:
            refuse: reports that the pool does not get the request, so that its dedup lock is released first.
                Otherwise the next delivery would be taken for a duplicate.
            requeue: requeue it in the broker; False when the connection is lost, because then the broker
                requeues it.
        """
        if self.is_over or self.in_pool:
            return
        self.is_over = True
        if self._request is not None:
            refuse(self._request)
        self._return(requeue)

    def forgotten(self, *, requeue: bool) -> None:
        """Release the message: the pool has dropped its job, which does not run.

        Args:
            requeue: see :meth:`release`.
        """
        if not self.is_over:
            self._return(requeue)

    def _return(self, requeue: bool) -> None:
        self.is_over = self._is_released = True
        if self._request is not None:
            _forget(self._request)
        try:
            if requeue and not self.message.acknowledged:
                self.message.requeue()
        finally:
            self._notify(self)


def _forget(request: Any) -> None:
    """Remove a request from Celery's lists, but not a later delivery of the same task."""
    other = state.requests.get(request.id)
    state.task_ready(request)
    if other is not None and other is not request:
        state.requests[request.id] = other


#: Seconds until a term in doubt, or an empty queue, is checked again.
LOOK_AGAIN_S = 0.1
#: Seconds until a request is repeated that the broker has answered with an error.
LOOK_AFTER_ERROR_S = 1.0
#: Seconds between looks for messages of dead workers; half the visibility timeout if that is shorter.
RESTORE_S = 10.0
#: Number of messages behind the present one that are read for dedup, where the broker shows them: on Redis
#: and ZooKeeper, and on AMQP those that the worker has been sent.
MOST = 100


class SequencedQueue:
    """One singleton queue in this worker.

    Attributes:
        source: the kombu queue to fetch from, or the consumer that receives; None while it is not consumed.
        asks: the worker fetches messages from the broker; otherwise the broker sends them.
        token: the fencing token of the term in which it is, or was, consumed.
        held: messages that were received, and have not begun.
        running: the message that may run now: its task runs, or waits, e.g. for a slot.
        is_releasing: held messages are being requeued.
        advancing: the next message is being started.
        looks: a check of the queue is scheduled, as the timer's entry `alarm`.
        asked_at: monotonic seconds since which the broker has not answered; None without an open request.
        unanswered: messages that are over and have no ack yet: declined calls that wait for a result.
        restored_at: monotonic seconds at which messages of dead workers were looked for.
        spent: a channel without a consumer, kept open for the acknowledgement of the running message.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.source: Any = None
        self.asks = False
        self.token = 0
        self.held: deque[Any] = deque()
        self.running: SingletonMessage | None = None
        self.is_releasing = False
        self.advancing = False
        self.looks = False
        self.outage = Outage(logger, "singleton_queue_outage")
        self.alarm: Any = None
        self.asked_at: float | None = None
        self.unanswered: list[SingletonMessage] = []
        self.restored_at = float("-inf")
        self.spent: Any = None
        # The last term that was checked for being cut off, and the time of its first check.
        self.judged = 0
        self.judged_at = 0.0

    def has_unconfirmed_acks(self) -> bool:
        """Whether a message has ended, and a broker whose acks another thread sends may still confirm it."""
        source = self.source
        read = getattr(self.spent if source is None else source.channel, "has_unconfirmed_acks", None)
        return read is not None and bool(read(self.name))


class SingletonSequencer(TaskSubscriber):
    """Consumes the singleton queues of a worker in its terms; a ``SingletonConsumer``.

    Args:
        consumer: Celery's consumer.
        leaderships: the leaderships of the worker.
        names: the singleton queues of this worker.
        lease_s: seconds without an answer of the broker after which another worker is to lead.
        clock: monotonic time, which measures the silence of the broker.
    """

    role = "singleton_queues"

    def __init__(
        self, consumer: Any, leaderships: Leaderships, names: Iterable[str], lease_s: float, clock: Clock
    ) -> None:
        self._consumer = consumer
        self._leaderships = leaderships
        self._lease_s = lease_s
        self._clock = clock
        #: Monotonic seconds of the connection's loss, and of the first wake-up that the loop has not
        #: received.
        self._lost_at: float | None = None
        self._woken_at: float | None = None
        self._queues = {name: SequencedQueue(name) for name in names}
        self._waker = Waker(self._on_wake)
        #: Whether a wake-up asks for :meth:`look`, and not only for a sign that the loop runs.
        self._must_look = False
        self._events = task_events(consumer)
        self._run = self._events.add_gate(self.role, self.take)
        self._events.subscribe(self)
        for name in self._queues:
            leaderships.attach_consumer(name, self)
        leaderships.add_listener(self._look_soon)

    # -- called by the leaderships, from any thread

    def is_busy(self, name: str, token: int) -> bool:
        """Whether a message of that term may come, is held or runs, or its end is not confirmed."""
        queue = self._queues[name]
        # Each look is at the next place of a message. A blocked loop has not received all that a broker sent.
        return queue.token == token and (
            (queue.source is not None and not queue.asks)
            or bool(queue.held)
            or queue.running is not None
            or queue.is_releasing
            or queue.has_unconfirmed_acks()
        )

    def is_cut_off(self, name: str, token: int) -> bool:
        """Whether the broker has been silent for a whole lease, all of it in that term.

        The broker is silent when the connection is lost, when a request has no answer, and when Celery's loop
        does not run: only a request to the broker blocks the loop for so long.
        """
        if stops(self._consumer):
            return False  # a stopping worker hands over, and its loop has ended
        queue = self._queues[name]
        now = self._clock.monotonic()
        if token != queue.judged:
            # A cut-off worker that is re-elected keeps the term for one lease, so that terms do not flap
            # where there is no other candidate.
            queue.judged, queue.judged_at = token, now
        if self._woken_at is None and self._may_wake():
            self._woken_at = now
            self._waker.wake()
        silent = [since for since in (self._lost_at, self._woken_at, queue.asked_at) if since is not None]
        return bool(silent) and now - max(min(silent), queue.judged_at) >= self._lease_s

    def _may_wake(self) -> bool:
        # A solo pool runs its tasks in the loop.
        return self._waker.is_attached and not isinstance(self._consumer.pool, SoloPool)

    # -- with the connection

    def start(self) -> None:
        """Begin to consume: there is a connection."""
        self._lost_at = self._woken_at = None
        if self._consumer.hub is not None:
            self._waker.attach(self._consumer.hub)
        self._look_soon()

    def stop(self) -> None:
        """Cease to consume, and release messages that the pool does not have: the connection ends."""
        ends = stops(self._consumer)
        if not ends:
            self._lost_at = self._clock.monotonic()
        for queue in self._queues.values():
            # Celery 5.5 clears its timer, so that a scheduled check would never be made.
            if queue.looks:
                self._consumer.timer.cancel(queue.alarm)
                queue.looks = False
            self._close(queue)
            queue.unanswered.clear()
            self._release(queue, requeue=ends, paused=True)

    def close(self) -> None:
        """Stop listening, and close the sockets: the worker ends."""
        self._leaderships.remove_listener(self._look_soon)
        self._waker.close()

    def _look_soon(self) -> None:
        """Schedule a check in the consumer's thread. May be called from any thread."""
        if self._waker.is_attached:
            self._must_look = True
            self._waker.wake()
        else:
            self._consumer.call_soon(self.look)

    def _on_wake(self) -> None:
        self._woken_at = None
        if self._must_look:
            # Reset first: another thread may ask again during the look.
            self._must_look = False
            self.look()

    def look(self) -> None:
        """Begin and cease to consume with the terms, and start messages that may start."""
        for queue in self._queues.values():
            token = self._leaderships.term_token(queue.name)
            if queue.source is not None and queue.token != token:
                # Close first: the end of a released message would start the next one.
                self._close(queue)
                self._release(queue)
            queue.unanswered = [each for each in queue.unanswered if not each.message.acknowledged]
            is_used = queue.running is not None or queue.asked_at is not None or queue.unanswered
            if queue.spent is not None and not is_used:
                spent = queue.spent
                with contextlib.suppress(*self._consumer.connection_errors, *self._consumer.channel_errors):
                    spent.close()
                # Only now, because closing waits for the acks. Another greenlet may have replaced it.
                if queue.spent is spent:
                    queue.spent = None
            if token and queue.source is None and queue.running is None:
                try:
                    self._open(queue, token)
                except Exception as error:
                    if self._is_celerys(queue, error):
                        raise
                    self._look_after_error(queue, error)
            self._advance(queue)

    def _open(self, queue: SequencedQueue, token: int) -> None:
        connection = self._consumer.connection
        if connection is None:
            return  # start() checks again
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
                # Messages of a leader that ends return to their places, so some may be sent ahead.
                source.qos(prefetch_count=MOST)
                source.consume()
        except BaseException:
            queue.spent = channel
            raise
        queue.source = source
        if not queue.asks:
            queue.outage.over("Singleton queue %r is consumed again: its broker answers.", queue.name)

    def _close(self, queue: SequencedQueue) -> None:
        """Cease to consume. The channel stays open for the ack of the running message."""
        source = queue.source
        if source is not None:
            queue.spent, queue.source = source.channel, None
            with contextlib.suppress(*self._consumer.connection_errors, *self._consumer.channel_errors):
                if not queue.asks:
                    source.cancel()

    def _release(self, queue: SequencedQueue, *, requeue: bool = True, paused: bool = False) -> None:
        errors = (*self._consumer.connection_errors, *self._consumer.channel_errors)
        running = queue.running
        # A message that waits for its dedup lock is released with the connection, or when it gets the lock.
        if running is not None and (paused or not running.is_elsewhere):
            with contextlib.suppress(*errors):
                running.release(self._events.refuse, requeue=requeue)
        queue.is_releasing = True
        try:
            while queue.held:
                message = queue.held.pop() if queue.asks else queue.held.popleft()
                if requeue:
                    with contextlib.suppress(*errors):
                        message.requeue()
        finally:
            queue.is_releasing = False

    # -- one message after the other

    def _received(self, queue: SequencedQueue, message: Any) -> None:
        queue.held.append(message)
        self._advance(queue)

    def _advance(self, queue: SequencedQueue) -> None:
        if queue.advancing:
            return  # a pool that runs its tasks at once calls this method recursively
        queue.advancing = True
        try:
            while queue.source is not None and queue.running is None:
                message = self._next(queue)
                if message is None:
                    return
                token = queue.token
                queue.running = SingletonMessage(
                    message,
                    queue.name,
                    token,
                    partial(self._leaderships.is_current, queue.name, token),
                    partial(self._over, queue),
                    partial(self._behind, queue),
                )
                queue.held.popleft()
                self._consumer.task_consumer.on_message(message)
        except Exception as error:
            # An error in Celery's own handling of a message ends the worker in the same way.
            if self._is_celerys(queue, error) or (
                self._consumer.hub is not None and queue.running is not None
            ):
                raise
            self._release(queue)
            self._look_after_error(queue, error)
        finally:
            queue.advancing = False

    def _next(self, queue: SequencedQueue) -> Any:
        """Return the next message that may start now; None without one."""
        if queue.asks and not queue.held and self._leaderships.is_current(queue.name, queue.token):
            self._ask(queue)
        if queue.held and self._leaderships.is_current(queue.name, queue.token):
            return queue.held[0]
        if queue.source is not None and (queue.asks or queue.held):
            self._look_later(queue, LOOK_AGAIN_S)
        return None

    def _ask(self, queue: SequencedQueue) -> None:
        """Fetch a message from a broker that sends none. Term and connection may end during the call."""
        source = queue.source
        queue.asked_at = self._clock.monotonic()
        try:
            self._restore(queue, source.channel)
            message = source.get(accept=self._consumer.app.conf.accept_content)
        finally:
            queue.asked_at = None
        queue.outage.over("Singleton queue %r is consumed again: its broker answers.", queue.name)
        if message is not None:
            queue.held.append(message)
            if queue.source is not source:
                self._release(queue)
        if queue.source is not source:
            self._look_soon()  # to close the channel

    def _restore(self, queue: SequencedQueue, channel: Any) -> None:
        """Let the broker have the messages of dead workers again.

        Kombu does so on Redis, for a connection that also consumes another queue.
        """
        now = self._clock.monotonic()
        if now - queue.restored_at >= min(RESTORE_S, getattr(channel, "visibility_timeout", RESTORE_S) / 2):
            queue.restored_at = now
            channel.qos.restore_visible(interval=1)

    def _is_celerys(self, queue: SequencedQueue, error: Exception) -> bool:
        """Whether Celery's loop must get the error: it makes a new connection, after which start() checks.

        A refusal of AMQP (of a queue that was declared otherwise) is permanent, and ends the worker. An error
        of a virtual transport of kombu may pass, such as of a Redis that loads or has no master.
        """
        if self._consumer.hub is None:
            return False  # there is no loop that could get it
        return not queue.asks or isinstance(error, self._consumer.connection_errors)

    def _look_after_error(self, queue: SequencedQueue, error: Exception) -> None:
        # The text of a refusal by the broker is complete; any other error is a fault of this package.
        refusals = (*self._consumer.connection_errors, *self._consumer.channel_errors)
        queue.outage.began(
            "Singleton queue %r is not consumed: its broker fails (%s: %s). It is tried again every %g s.",
            queue.name,
            type(error).__name__,
            error,
            LOOK_AFTER_ERROR_S,
            exc_info=None if isinstance(error, refusals) else error,
        )
        self._look_later(queue, LOOK_AFTER_ERROR_S)

    def _look_later(self, queue: SequencedQueue, pause_s: float) -> None:
        if not queue.looks:
            queue.looks = True
            queue.alarm = self._consumer.timer.call_after(pause_s, self._look_again, (queue,))

    def _look_again(self, queue: SequencedQueue) -> None:
        queue.looks = False
        if self._consumer.pool.is_green and queue.source is not None:
            self._advance(queue)
        else:
            self._look_soon()

    # -- a task on its way through the pool

    def take(self, request: Any) -> Any:
        """Give a request the token of its term, and pass it on."""
        message = _message_of(request)
        if message is None:
            # A retry has inherited these headers, or they are forged: only the leader sets them.
            for headers in (request.message.headers, request.request_dict):
                if headers.pop(QUEUE_HEADER, None) is not None:
                    headers.pop(TOKEN_HEADER, None)
        elif not message.take(request):
            return None
        return self._run(request)

    def follows(self, request: Any) -> bool:
        """See :class:`TaskSubscriber`."""
        return _message_of(request) is not None

    def offered(self, request: Any) -> None:
        """Refuse a message that was released, or whose term has ended."""
        request.message.dq_singleton_message.enter_pool()

    def refused(self, request: Any) -> None:
        """See :class:`TaskSubscriber`."""
        request.message.dq_singleton_message.refused()

    def failed_to_start(self, request: Any) -> None:
        """Requeue a message that had to wait for a slot of the pool. Any other error reaches :meth:`look`."""
        message = request.message.dq_singleton_message
        message.in_pool = False
        if not any(queue.advancing for queue in self._queues.values() if queue.running is message):
            # The error is raised in the callback of another task, where it stops no worker.
            with contextlib.suppress(*self._consumer.connection_errors, *self._consumer.channel_errors):
                message.forgotten(requeue=True)

    def ended(self, request: Any, info: Any) -> None:
        """Start the next message."""
        request.message.dq_singleton_message.end()

    def forgotten(self, request: Any) -> None:
        """Release a message whose job the pool has dropped, after a lost connection or at the end."""
        with contextlib.suppress(*self._consumer.connection_errors, *self._consumer.channel_errors):
            request.message.dq_singleton_message.forgotten(requeue=stops(self._consumer))

    def _behind(self, queue: SequencedQueue) -> list[Mapping[str, Any]]:
        if queue.source is None:
            return []
        if not queue.asks:
            return [message.headers for message in queue.held]
        try:
            return waiting_headers(queue.source.channel, queue.name)
        except (*self._consumer.connection_errors, *self._consumer.channel_errors, DQError):
            return []  # the calls behind it run, too

    def _over(self, queue: SequencedQueue, message: SingletonMessage) -> None:
        if queue.running is not message:
            return
        queue.unanswered = [each for each in (*queue.unanswered, message) if not each.message.acknowledged]
        queue.running = None
        if self._consumer.pool.is_green and queue.source is not None:
            # Not in the loop, whose next turn may be seconds away. Nor here: this greenlet has a slot of the
            # pool until it ends, and would wait for a free slot for ever.
            self._consumer.timer.call_after(0, self._advance, (queue,))
        else:
            self._look_soon()


def _message_of(request: Any) -> SingletonMessage | None:
    return getattr(request.message, "dq_singleton_message", None)


def waiting_headers(channel: Any, queue: str) -> list[Mapping[str, Any]]:
    """Return the headers of the next messages of a queue; none for a broker that does not show them."""
    if isinstance(channel, RedisChannel):
        found: list[Any] = []
        for step in channel.priority_steps:
            key = f"{queue}{channel.sep}{step}" if step else queue
            found += reversed(channel.client.lrange(key, -MOST, -1))
        return [headers for each in found[:MOST] if (headers := _headers(each))]
    read = getattr(channel, "waiting_headers", None)  # that of ZooKeeper
    return [] if read is None else list(read(queue, MOST))


def _headers(raw: Any) -> Mapping[str, Any]:
    try:
        headers = json.loads(raw)["headers"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}
    return headers if isinstance(headers, dict) else {}


class SequencedSingletonStep(SingletonStep):
    """Consumes each singleton queue in the terms of the worker, one message after the other.

    Does nothing on a tenant broker, whose scripts refuse a stale token.
    """

    fenced = False

    def _sections(self, consumer: Any, options: Options) -> dict[str, SingletonOptions]:
        if not options.election and consumer.conninfo.transport.driver_type == "amqp":
            # RabbitMQ implements its argument itself: one consumer at a time, without elections and tokens.
            return {section.name: section for section in options.singletons}
        return super()._sections(consumer, options)

    def _lead(
        self, consumer: Any, context: AppContext, sections: dict[str, SingletonOptions]
    ) -> WorkerLeaderships:
        leaderships = super()._lead(consumer, context, sections)
        # Celery's own consumer must not consume them, because it ignores leaderships.
        for name in sections:
            consumer.app.amqp.queues.deselect(name)
        lease_s = context.options.lease_us / 1e6
        self._sequencer = SingletonSequencer(consumer, leaderships, sections, lease_s, SystemClock())
        return leaderships

    def start(self, consumer: Any) -> None:
        """Consume in the terms of the worker, and become a candidate."""
        self._sequencer.start()
        super().start(consumer)

    def stop(self, consumer: Any) -> None:
        """Cease to consume: the connection ends, or the worker."""
        self._sequencer.stop()

    def shutdown(self, consumer: Any) -> None:
        """Hand over: the pool is drained or killed."""
        self._sequencer.close()
        super().shutdown(consumer)
