"""The part of a channel that consumes: its consumers, and what a consumer thread brings for them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from queue import Empty
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import redis

from celery_dq.errors import ConfigurationError
from celery_dq.protocols import WorkerCapacity
from celery_dq.shown import shown_logger, shown_url
from celery_dq.transport.bases import VirtualChannel
from celery_dq.transport.in_flight.in_flight_messages import InFlightMessages
from celery_dq.transport.redis.bases import RedisChannel
from celery_dq.transport.redis.consuming.broadcasts import Broadcasts
from celery_dq.transport.redis.consuming.delivery import ChannelDelivery
from celery_dq.transport.redis.consuming.partition_consumers import QueueConsumer
from celery_dq.transport.redis.consuming.trip import RETRY_AFTER_REFUSAL_S
from celery_dq.transport.redis.consuming.wakeups import WakeupGroups
from celery_dq.transport.redis.store.address import socket_options
from celery_dq.transport.redis.store.queue import PartitionedQueue, Queue
from celery_dq.transport.redis.store.server_errors import (
    BrokerNotReady,
    BrokerOverloaded,
    refusals_named,
)
from celery_dq.transport.redis.store.transient import TransientQueues
from celery_dq.transport.threaded_channel import handle_transient

if TYPE_CHECKING:
    from celery_dq.transport.redis.connection_context import ConnectionContext
    from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity

logger = shown_logger(__name__)

#: Seconds between two looks of a waiting worker whether it is to stop.
STOP_CHECK_S = 0.1

_M = TypeVar("_M", bound=Callable[..., Any])


def waits_for_redis(method: _M) -> _M:
    """Let a channel of a worker wait while Redis refuses a command of *method* for a reason that passes.

    Elsewhere the error is raised, with its meaning, also for calls in the worker's process, which have limits
    of their own. The method may be called again after such an error.
    """

    @wraps(method)
    def wait(self: ConsumingChannel, *args: Any, **kwargs: Any) -> Any:
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
                self.identity.refusals.refused(command, exc)
                tries_at = self.identity.clock.monotonic() + RETRY_AFTER_REFUSAL_S
                while self.identity.clock.monotonic() < tries_at:
                    if capacity.closing:
                        raise BrokerNotReady(str(exc)) from exc
                    time.sleep(STOP_CHECK_S)
            else:
                self.identity.refusals.accepted(command)
                return result

    return cast("_M", wait)


class DeclaredQueues(Protocol):
    """The queues that a channel has declared together."""

    def was_empty(self, partition: Queue) -> bool:
        """Return whether a partition stored no message when it was declared, a moment ago."""

    @property
    def has_empty(self) -> bool:
        """Whether :meth:`was_empty` is true of any partition."""

    def clear(self) -> None:
        """Forget all of them."""


class OneAnswer:
    """An answer that the consumer thread has read, with the interface of a subscriber of redis-py."""

    connection = None

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def parse_response(self, *_: Any, **__: Any) -> Any:
        """Return the answer."""
        return self._answer

    def handle_message(self, *_: Any) -> None:
        """Do nothing: the consumer thread has done its book-keeping."""


class ConsumingChannel(RedisChannel):
    """The part of a channel that consumes."""

    wakeups_class = WakeupGroups
    consumer: ChannelDelivery
    identity: ConsumerIdentity
    in_flight: InFlightMessages
    transients: TransientQueues
    _broadcasts: Broadcasts | None
    _seen_partitions: int
    _gone_partitions: set[str]
    #: Monotonic time until which the partitions are not looked at, after a refusal.
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

    def thread_clients(self) -> Callable[[], redis.Redis]:
        """Return a factory of Redis clients for the consumer thread."""
        return self.own_clients(self.identity.threads.answer_timeout_s)

    @property
    def capacity(self) -> WorkerCapacity | None:
        """Capacity of the worker that consumes from this channel; None in plain kombu."""
        return self.context.capacity

    @waits_for_redis
    def start_consumers(self) -> None:
        """Start the consumers that wait for it; they go on to wait if that fails."""
        if not self._starting:
            return
        queues = self.context.queues_to_consume([queue for queue, *_ in self._starting.values()], self.client)
        self.in_flight.add_listener(self.connection.acks_changed)
        consumers = []
        for tag, queue in zip(tuple(self._starting), queues, strict=True):
            _, callback, no_ack = self._starting.pop(tag)
            consumers.append(QueueConsumer(tag, queue, callback, no_ack))
        self.consumer.start_consumers(consumers)
        if self.ahead.has_empty:
            # No claim takes the leases there. A heartbeat does, on many partitions in a round trip.
            self.identity.threads.wake()

    def follow_partitions(self) -> None:
        """Consume the partitions that the queues have now, because the number of some has changed."""
        maps = self.identity.partition_maps
        doubted = maps.take_doubts()
        self._seen_partitions = maps.changes
        with self.identity.refusals.watch("look at the partitions") as outcome:
            for name in doubted:
                with suppress(ConfigurationError):  # logged below, where the queue is consumed
                    self.queues(name, refresh=True)
            self._seen_partitions = maps.changes
            self.consumer.follow_partitions(self._queue_now)
        if outcome.refused:
            self._resumes_at = self.identity.clock.monotonic() + RETRY_AFTER_REFUSAL_S
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
                self.identity.consumer,
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
                self.identity.consumer,
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
                self.identity.consumer,
                now.name,
                len(now.partitions),
                extra={"event": "partitions_followed", "queue": whole.name},
            )
        return now

    def handle_transient(self, handle: Callable[[], Any], origin: str) -> Any:
        """Decode and handle a message; see :func:`handle_transient`."""
        in_worker = self.context.capacity is not None
        return handle_transient(handle, origin, in_worker=in_worker, passing=self.connection_errors)

    # -- the delivering side

    def wake_delivery(self) -> None:
        """Let the transport deliver; callable from any thread."""
        transport = self.connection
        if transport is not None:
            transport.wake_delivery()

    @property
    def has_new_partitions(self) -> bool:
        """Whether the number of partitions of a queue may have changed."""
        allocated = self.consumer.allocated_partitions
        differs = self._seen_partitions != self.identity.partition_maps.changes or (
            allocated is not None and allocated.differs
        )
        return differs and self._looks_at_partitions

    @property
    def _looks_at_partitions(self) -> bool:
        return self.identity.clock.monotonic() >= self._resumes_at

    def tick(self) -> None:
        """Follow what has changed, before messages are delivered."""
        consumer = self.consumer
        if consumer.failure is not None:
            self._broken = True
            raise self._connection_error(consumer.failure)
        try:
            if self._starting:
                self.start_consumers()
            allocated = consumer.allocated_partitions
            follows = allocated is not None and allocated.has_changed()
            if follows:
                self._seen_partitions = -1
            if self._seen_partitions != self.identity.partition_maps.changes and self._looks_at_partitions:
                self.follow_partitions()
            if consumer.watchdog.suspected_at is not None:
                consumer.watchdog.decide(may_stop=self.capacity is not None)
        except self.connection_errors:
            self._broken = True
            raise

    def _connection_error(self, failure: Exception) -> Exception:
        if isinstance(failure, self.connection_errors):
            return failure
        error = redis.ConnectionError(f"The consumer thread failed: {failure!r}")
        error.__cause__ = failure
        return error

    # -- consuming

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        """Change the prefetch count, and claim more messages if it allows."""
        super().basic_qos(prefetch_size, prefetch_count, apply_global)
        self.identity.threads.wake()

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], Any], consumer_tag: str, **kwargs: Any
    ) -> None:
        """Consume *queue*; several consumers of one queue on a channel take turns.

        Those with ``nowait``, which kombu sets for all queues of a consumer but the last one, begin together.
        """
        self.context.refuse_inherited()
        if queue in self._fanout_queues:
            super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
            self._follow_broadcasts()
        elif self.transients.exists(self.client, queue):
            # Kombu's base class wraps the payload and calls back.
            VirtualChannel.basic_consume(self, queue, no_ack, callback, consumer_tag, **kwargs)
            self.consumer.attach()
            listen = partial(self.consumer.claims.listen, self.transients.key(queue))
            self.identity.threads.request(partial(listen, partial(self._receive_transient, queue)))
        else:
            self._tag_to_queue[consumer_tag] = queue
            self._active_queues.append(queue)
            self._consumers.add(consumer_tag)
            self._starting[consumer_tag] = (queue, callback, no_ack)
        if not kwargs.get("nowait"):
            self.start_consumers()
            self.ahead.clear()

    def _receive_transient(self, queue: str, raw: bytes) -> None:
        self.consumer.receive_other(partial(self._deliver_transient, queue, raw))

    def _deliver_transient(self, queue: str, raw: bytes) -> bool:
        self.handle_transient(
            lambda: self.connection._deliver(self.transients.decode(raw), queue), f"queue {queue}"
        )
        return True

    def _follow_broadcasts(self) -> None:
        thread, consumer = self.identity.threads, self.consumer
        if self._broadcasts is None:
            self._broadcasts = consumer.claims.broadcasts = Broadcasts(
                thread.new_client, self._receive_broadcast, self.identity.refusals
            )
            consumer.attach()
        topics = [topic for queue in self.active_fanout_queues for topic in self._topics_of(queue)]
        self._broadcasts.follow(topics)
        thread.wake()

    def _topics_of(self, queue: str) -> list[str]:
        if hasattr(self, "_get_subscribe_topics"):
            return list(self._get_subscribe_topics(queue))
        return [self._get_subscribe_topic(queue)]

    def _receive_broadcast(self, answer: Any) -> None:
        self.consumer.receive_other(partial(self._deliver_broadcast, answer))

    def _deliver_broadcast(self, answer: Any) -> bool:
        receive = partial(self._receive_one, OneAnswer(answer))  # type: ignore[attr-defined]
        try:
            return bool(self.handle_transient(receive, "the broadcasts"))
        except Empty:
            return False

    def _unsubscribe_from(self, queue: str) -> None:
        """Do nothing: :meth:`_follow_broadcasts` follows."""

    def basic_cancel(self, consumer_tag: str) -> None:
        """Stop a consumer, and release its undelivered messages to their places in the queue."""
        queue = self._tag_to_queue.get(consumer_tag)
        if queue is None:
            return
        if queue in self.active_fanout_queues:
            self._basic_cancel(consumer_tag)
            self._follow_broadcasts()
            return
        if self.transients.is_declared(queue):
            thread, key = self.identity.threads, self.transients.key(queue)
            thread.run_between_trips(partial(self.consumer.claims.unlisten, key), 1.0)
        else:
            self._starting.pop(consumer_tag, None)
            self.consumer.stop_consumer(consumer_tag)
        VirtualChannel.basic_cancel(self, consumer_tag)

    # -- acknowledging

    def send_acks_now(self) -> None:
        """Wait for the confirmation of acks, in a program that does not wait for messages now.

        Raises:
            redis.ConnectionError: The broker did not answer. The acks stay pending.
        """
        consumer = self.consumer
        if self.capacity is None and not consumer.is_asked and not consumer.flush():
            raise redis.ConnectionError("Redis did not confirm an acknowledgement, which is sent again")

    def _send_acks(self) -> None:
        self.consumer.flush()

    def _on_connection_disconnect(self, connection: Any) -> None:
        """Do nothing: the consumer thread looks after its connections."""
