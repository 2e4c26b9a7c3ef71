"""The part of a channel that an event loop drives: it sends due calls and reads their answers."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import redis

from celery_dq.compat.redis_sockets import reporting_connection
from celery_dq.errors import ConfigurationError
from celery_dq.shown import shown_url
from celery_dq.transport.redis.bases import RedisChannel
from celery_dq.transport.redis.consuming.consuming_channel import DeclaredQueues, WatchedSocket
from celery_dq.transport.redis.consuming.partition_consumers import QueueConsumer
from celery_dq.transport.redis.consuming.wakeups import WakeupGroups
from celery_dq.transport.redis.in_flight.script_pipeline import RETRY_AFTER_REFUSAL_S, ScriptPipeline
from celery_dq.transport.redis.store.address import socket_options
from celery_dq.transport.redis.store.queue import PartitionedQueue
from celery_dq.transport.redis.store.refusals import (
    BrokerNotReady,
    BrokerOverloaded,
    BrokerRefused,
    refusals_named,
)
from celery_dq.transport.transient_messages import handle_transient

if TYPE_CHECKING:
    from celery_dq.transport.redis.connection_context import ConnectionContext
    from celery_dq.transport.redis.consuming.channel_consumer import ChannelConsumer
    from celery_dq.transport.redis.consuming.poller import Poller
    from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity

logger = logging.getLogger(__name__)

#: Seconds between two health checks of the PUB/SUB connection.
HEALTH_CHECK_SECONDS = 25.0
#: Seconds between two looks of a waiting worker whether it is to stop.
STOP_CHECK_S = 0.1

_M = TypeVar("_M", bound=Callable[..., Any])


def waits_for_redis(method: _M) -> _M:
    """Let a channel of a worker wait while Redis refuses a command of *method* for a reason that passes.

    Elsewhere the error is raised, with its meaning, also for calls in the worker's process, which have limits
    of their own. The method may be called again after such an error.
    """

    @wraps(method)
    def wait(self: EventLoopChannel, *args: Any, **kwargs: Any) -> Any:
        command = method.__name__.strip("_").replace("_", " ")
        while True:
            try:
                with refusals_named():
                    result = method(self, *args, **kwargs)
            except BrokerOverloaded as exc:  # noqa: PERF203 - each attempt may be refused
                capacity = self.context.capacity
                has_limits = "errback" in self.connection.client.transport_options
                if capacity is None or has_limits or isinstance(exc, redis.ConnectionError):
                    raise
                self.process.refusals.refused(command, exc)
                tries_at = self.process.clock.monotonic() + RETRY_AFTER_REFUSAL_S
                while self.process.clock.monotonic() < tries_at:
                    if capacity.closing:
                        raise BrokerNotReady(str(exc)) from exc
                    time.sleep(STOP_CHECK_S)
            else:
                self.process.refusals.accepted(command)
                return result

    return cast("_M", wait)


class EventLoopChannel(RedisChannel):
    """The part of a channel that an event loop or ``drain_events`` drives."""

    pipeline_class = ScriptPipeline
    wakeups_class = WakeupGroups
    consumer: ChannelConsumer
    process: ConsumerIdentity
    poller: Poller
    _subscribed: set[str]
    _health_check_at: float
    _seen_partitions: int
    _gone_partitions: set[str]
    #: Monotonic time until which neither partitions nor broadcasts are looked at, after a refusal.
    _resumes_at: float
    #: Queue, callback and ``no_ack`` of the consumers that were asked for and have not begun, by their tags.
    _starting: dict[str, tuple[str, Callable[[Any], Any], bool]]
    queues: Callable[..., PartitionedQueue]
    _broken: bool
    ahead: DeclaredQueues
    context: ConnectionContext

    def _apply_environment_prefix(self) -> None:
        """Separate broadcasts and bindings from those of other environments and prefixes."""
        prefix = self.context.broadcast_prefix
        if prefix:
            # Kombu removes the part before the first dot on receipt, and applies % or format() to both.
            self.fanout_prefix = "/{db}/" + prefix.replace(".", "_") + "."
            self.keyprefix_queue = prefix.replace("%", "%%") + self.keyprefix_queue
            self.keyprefix_binding_permanent = prefix.replace("%", "%%") + "_kombu.binding_permanent.%s"
            self.keyprefix_binding_deadlines = prefix + "_kombu.binding_deadlines"

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        try:
            params = super()._connparams(asynchronous)
        except ValueError as exc:
            why = shown_url(exc) if "@" in str(exc) else exc
            raise ConfigurationError(f"broker_url cannot be used: {why}") from exc
        if asynchronous:
            # A connection leaves the poller before its socket closes. Kombu reports a disconnect only
            # afterwards, when epoll can no longer unregister the closed descriptor. If a forked child keeps
            # the socket open, its events continue. The next connection may reuse the descriptor.
            params["connection_class"] = reporting_connection(
                params["connection_class"], self.poller.watch_again, self.poller.forget_connection
            )
        return {**params, **socket_options(self.connection.client.hostname)}

    def own_clients(self, timeout_s: float = math.inf) -> Callable[[], redis.Redis]:
        """Return a factory of Redis clients for another thread, which may outlive this channel.

        Args:
            timeout_s: Longest wait for a connection or an answer, in seconds. Shorter timeouts of the channel
                stay.
        """
        # A new pool, which has no connection yet.
        pool = self._get_pool()
        for name in {"socket_timeout", "socket_connect_timeout"} & pool.connection_kwargs.keys():
            configured = pool.connection_kwargs[name]
            if timeout_s < (math.inf if configured is None else configured):
                pool.connection_kwargs[name] = timeout_s
        return partial(self.Client, connection_pool=pool)

    def heartbeat_clients(self) -> Callable[[], redis.Redis]:
        """Return a factory of Redis clients for the heartbeat thread."""
        return self.own_clients(self.process.heartbeat.answer_timeout_s)

    @waits_for_redis
    def start_consumers(self) -> None:
        """Start the consumers that wait for it; they go on to wait if that fails."""
        if not self._starting:
            return
        queues = self.context.queues_to_consume([queue for queue, *_ in self._starting.values()], self.client)
        self.context.register_consumer()
        for tag, queue in zip(tuple(self._starting), queues, strict=True):
            _, callback, no_ack = self._starting.pop(tag)
            self.consumer.start_consumer(QueueConsumer(tag, queue, callback, no_ack))
        if self.ahead.has_empty:
            # No claim takes the leases there. A heartbeat does, on many partitions in a round trip.
            self.process.heartbeat.wake()

    def tick(self) -> None:
        """Send the due calls; see :class:`~celery_dq.transport.redis.consuming.fetcher.RedisFetcher`."""
        if self._starting:
            self.start_consumers()
        now = self.process.clock.monotonic()
        if self.active_fanout_queues - self._subscribed and now >= self._resumes_at:
            self._subscribe()
        if self._subscribed and now >= self._health_check_at:
            self._check_health()
        if self.consumer.singleton_delivery is not None:
            self.follow_leaderships()
        allocated = self.consumer.allocated_partitions
        follows = allocated is not None and allocated.has_changed()
        fetcher = self.consumer.live_fetcher
        if fetcher is not None or allocated is not None:
            try:
                if follows:
                    self._seen_partitions = -1
                if self._seen_partitions != self.process.partition_maps.changes and now >= self._resumes_at:
                    self.follow_partitions()
                    fetcher = self.consumer.live_fetcher
                if fetcher is not None:
                    self.consumer.check()
                    fetcher.tick()
            except self.connection_errors:
                self._mark_broken()
                raise

    def follow_partitions(self) -> None:
        """Consume the partitions that the queues have now, because the number of some has changed."""
        maps = self.process.partition_maps
        doubted = maps.take_doubts()
        self._seen_partitions = maps.changes
        with self.process.refusals.watch("look at the partitions") as outcome:
            for name in doubted:
                with suppress(ConfigurationError):  # logged below, where the queue is consumed
                    self.queues(name, refresh=True)
            self._seen_partitions = maps.changes
            self.consumer.follow_partitions(self._queue_now)
        if outcome.refused:
            self._resumes_at = self.process.clock.monotonic() + RETRY_AFTER_REFUSAL_S
            for name in doubted:
                maps.doubt(name)
            self._seen_partitions = -1

    def _queue_now(self, queue: PartitionedQueue) -> PartitionedQueue | None:
        """Return a consumed queue with the partitions that it has now; None for a partition that has gone."""
        try:
            whole = self.queues(queue.whole_name)
        except ConfigurationError as exc:
            logger.error(
                "Worker %s consumes queue %s as before, although its number of partitions has changed: %s.",
                self.process.consumer,
                queue.name,
                exc,
                extra={"event": "partitions_not_followed", "queue": queue.name},
            )
            return queue
        now = queue.part_of(whole)
        if now is None and queue.name not in self._gone_partitions:
            self._gone_partitions.add(queue.name)
            logger.warning(
                "Worker %s gets no messages of %s any more, because queue %s has %d partitions now (before: "
                "%d). Start it with -Q %s, which follows the number.",
                self.process.consumer,
                queue.name,
                whole.name,
                whole.count,
                queue.count,
                whole.name,
                extra={"event": "partition_gone", "queue": queue.name},
            )
        elif now is not None and (now.count != queue.count or now.name in self._gone_partitions):
            self._gone_partitions.discard(now.name)
            logger.info(
                "Queue %s has %d partitions now (before: %d); worker %s consumes %s, in %d partitions.",
                whole.name,
                whole.count,
                queue.count,
                self.process.consumer,
                now.name,
                len(now.partitions),
                extra={"event": "partitions_followed", "queue": whole.name},
            )
        return now

    def follow_leaderships(self) -> None:
        """Deliver the next messages of singleton queues.

        See :class:`~celery_dq.transport.redis.consuming.singleton_delivery.SingletonDelivery`.
        """
        if self.consumer.singleton_delivery is not None:
            try:
                self.consumer.singleton_delivery.follow_leaderships()
            except self.connection_errors:
                self._mark_broken()
                raise

    def _subscribe(self) -> None:
        topics = [self._get_subscribe_topic(queue) for queue in self.active_fanout_queues]
        if hasattr(self, "_get_subscribe_topics"):
            topics = [
                topic for queue in self.active_fanout_queues for topic in self._get_subscribe_topics(queue)
            ]
        self.subclient.psubscribe(*topics)
        self._in_listen = self.subclient.connection
        self.poller.watch_again()
        self._subscribed = set(self.active_fanout_queues)

    def _check_health(self) -> None:
        self._health_check_at = self.process.clock.monotonic() + HEALTH_CHECK_SECONDS
        if self.subclient.health_check_response_counter > 1:
            raise redis.ConnectionError(
                "The PUB/SUB connection does not answer its health checks: it is dead"
            )
        self.subclient.check_health()

    def connections(self) -> list[WatchedSocket]:
        """Return the connections that the poller watches."""
        fetcher = self.consumer.live_fetcher
        found = [] if fetcher is None else fetcher.connections()
        if self._in_listen:
            found.append(WatchedSocket("broadcasts", self._in_listen, self._receive_broadcasts))
        return found

    def handle_transient(self, handle: Callable[[], Any], source: str) -> Any:
        """Decode and handle a message; see :func:`handle_transient`."""
        in_worker = self.context.capacity is not None
        return handle_transient(handle, source, in_worker=in_worker, passing=self.connection_errors)

    def _receive_broadcasts(self) -> Any:
        """Read all broadcasts that have arrived, also those behind one that cannot be handled.

        Raises:
            redis.ResponseError: Redis has refused a subscription or a health check.
        """
        answer = self._receive_some()
        while self.subclient.connection is not None and self.subclient.connection.can_read(timeout=0):
            self._receive_some()
        return answer

    def _receive_some(self) -> Any:
        answer = self.handle_transient(self._receive_or_refusal, "the broadcasts")
        if isinstance(answer, redis.ResponseError):
            raise answer
        return answer

    def _receive_or_refusal(self) -> Any:
        """Read broadcasts, or return the answer to a refused subscription or health check."""
        try:
            return self._receive()
        except self.connection_errors:
            raise
        except redis.ResponseError as exc:
            if isinstance(exc, BrokerRefused):
                raise  # of a receiver of the broadcast
            return exc

    def on_readable(self, watched: WatchedSocket, deliver: bool) -> bool:
        """Read the answer that has arrived.

        Args:
            watched: One of the :meth:`connections`, whose socket is readable.
            deliver: Whether to deliver the messages of the inbox now.

        Returns:
            Whether a broadcast or a message of a transient queue was delivered.
        """
        try:
            served = bool(watched.read())
        except self.connection_errors:
            self._mark_broken()
            raise
        except redis.ResponseError as exc:
            if watched.kind != "broadcasts" or isinstance(exc, BrokerRefused):
                raise  # an error of a callback has a meaning
            # It was a subscription or a health check, and an error is an answer as well.
            self.process.refusals.refused("subscription to broadcasts", exc)
            self._resumes_at = self.process.clock.monotonic() + RETRY_AFTER_REFUSAL_S
            self.subclient.health_check_response_counter = 0
            self._subscribed.clear()
            return False
        if watched.kind == "broadcasts":
            self.process.refusals.accepted("subscription to broadcasts")
            return served
        if deliver and self.consumer.singleton_delivery is not None:
            # Claimed messages of singleton queues go into the inbox.
            self.follow_leaderships()
        if deliver and self.has_inbox:
            if self.consumer.has_messages:
                # The next claim is sent before this batch runs, so that neither side waits. With discards
                # only, the claim waits until they are recorded, and then finds newer messages as well.
                self.tick()
            self.consumer.deliver_all()
        return served

    def _mark_broken(self) -> None:
        self._broken = True
        if self.consumer.live_fetcher is not None:
            self.consumer.live_fetcher.close()

    def read_all_answers(self) -> None:
        """Read all outstanding answers, unless an event loop does so."""
        fetcher = self.consumer.live_fetcher
        if fetcher is not None:
            self._if_no_loop_turns(fetcher.read_all_answers)

    def send_all_acks(self) -> None:
        """Send all pending acks, unless an event loop does so."""
        self._if_no_loop_turns(self._send_acks)

    def _if_no_loop_turns(self, send: Callable[[], None]) -> None:
        if not (self._broken or self._loop_turns):
            try:
                send()
            except (redis.RedisError, OSError):
                # The heartbeat thread sends the acks.
                self._mark_broken()

    def send_acks_now(self) -> None:
        """Send all pending acks at once, unless an event loop does so.

        Raises:
            redis.RedisError: The broker did not answer. The unanswered acks stay pending.
        """
        if self.closed or self.connection is None:
            self.process.heartbeat.send_pending_acks_soon()
        elif not self.poller.is_driven:
            self._send_acks()
        else:
            self.send_acks_at_shutdown()

    def send_acks_at_shutdown(self) -> None:
        """Let the heartbeat thread send the acks, if the event loop has ended because the worker stops."""
        # Tasks may still run, and a broker that does not answer must not delay them.
        capacity = self.context.state.capacity
        if capacity is not None and capacity.closing and self.poller.is_driven:
            self.process.heartbeat.send_pending_acks_soon()

    def _send_acks(self) -> None:
        for queue, _ in self.process.queues_with_acks():
            self.process.heartbeat.send_pending_acks(queue, self.client)

    @property
    def _loop_turns(self) -> bool:
        # A worker that shuts down has left its event loop, which would never read the answers.
        capacity = self.context.state.capacity
        return self.poller.is_driven and not (capacity is not None and capacity.closing)

    @property
    def has_inbox(self) -> bool:
        """Whether a message may be delivered, or a delivered one of a singleton queue may start."""
        consumer = self.consumer
        if consumer.live_fetcher is None:
            return False  # the channel has only broadcasts
        if consumer.singleton_delivery is not None and consumer.has_startable:
            return True
        return consumer.has_undelivered

    @property
    def expects_answer(self) -> bool:
        """Whether a script is under way."""
        fetcher = self.consumer.live_fetcher
        return fetcher is not None and fetcher.expects_answer

    def next_deadline(self) -> float:
        """Return when :meth:`tick` must run even if nothing arrives, a monotonic time; infinity for never."""
        fetcher = self.consumer.live_fetcher
        return math.inf if fetcher is None else min(fetcher.next_deadline(), self.consumer.overdue_at())

    def send_acks_after_batch(self) -> None:
        """Send pending acks when ``drain_events`` returns, unless the inbox holds more messages."""
        fetcher = self.consumer.live_fetcher
        if self._broken:
            return  # this call would not read a new connection: the heartbeat or the next tick sends the acks
        if fetcher is not None and not self.has_inbox and not self.closed:
            fetcher.pipeline.send_pending_acks(self.process.clock.monotonic())

    def _on_connection_disconnect(self, connection: Any) -> None:
        if self._in_listen is connection:
            self._in_listen = None
            self._subscribed.clear()
