"""The kombu transport for ``dq-redis://`` and ``dq-rediss://``, and its channel.

Connection string::

    dq-redis://[user:password@]host[:port][/db]
    dq-rediss://…                         (TLS; see ``broker_use_ssl``)
    dq-redis+socket:///path/to/redis.sock[?db=3&socket_timeout=5] (a unix socket)

Transport options are those of kombu's Redis transport that concern the connection: ``socket_timeout`` (15 s
here), ``socket_connect_timeout`` (5 s), ``socket_keepalive``, ``max_connections``, ``health_check_interval``,
``client_name``, ``fanout_prefix``, ``fanout_patterns``. ``global_keyprefix`` is refused, because it would
apply to some of the keys only: set ``dq_key_prefix``.

Features: direct, topic and fanout exchanges, priorities, ETA, expiry, remote control, batches.

Kombu's own Redis channel provides connection parameters, TLS, Sentinel, credential providers, exchange
tables, and fanout by PUB/SUB. :class:`Channel` provides queueing, acknowledgement and waiting.

Two kinds of queues exist. An ordinary queue is a partition. A *transient* queue (``auto_delete``, and either
not durable or with ``x-expires``) is a plain Redis list that expires (``store/transient.py``).
"""

from __future__ import annotations

import math
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cached_property, partial, wraps
from itertools import chain
from queue import Empty
from typing import Any, Protocol, TypeVar, cast

import redis

from celery_dq.errors import ConfigurationError, CorruptRecord
from celery_dq.protocols import CONTINUES, COUNTDOWN, DEDUP_PROPERTY, WorkerCapacity
from celery_dq.shown import shown_logger, shown_name, shown_url
from celery_dq.transport.bases import VirtualChannel, VirtualTransport
from celery_dq.transport.in_flight import InFlightMessage, InFlightMessages, Message, QoS
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.packer import STAMPS
from celery_dq.transport.redis.bases import RedisChannel, RedisTransport
from celery_dq.transport.redis.connection_context import ConnectionContext
from celery_dq.transport.redis.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.consuming.broadcasts import Broadcasts
from celery_dq.transport.redis.consuming.consumer_thread import RETRY_AFTER_REFUSAL_S
from celery_dq.transport.redis.consuming.delivery import ChannelDelivery, QueueConsumer
from celery_dq.transport.redis.consuming.subscriptions import WakeupGroups
from celery_dq.transport.redis.store.address import option_names, socket_options
from celery_dq.transport.redis.store.full_server import add_member, is_full
from celery_dq.transport.redis.store.partition import DepthCall, Partition, PartitionedQueue, Queue
from celery_dq.transport.redis.store.partition_map import PartitionMap
from celery_dq.transport.redis.store.publisher import RedisPublishBatch, RedisPublisher
from celery_dq.transport.redis.store.rounds import Rounds, run_rounds
from celery_dq.transport.redis.store.server_checks import PASSING_ERRORS, connection_refusals_named
from celery_dq.transport.redis.store.server_errors import (
    BrokerNotReady,
    BrokerOverloaded,
    refusals_as_outage,
    refusals_named,
)
from celery_dq.transport.redis.store.transient import TransientQueues
from celery_dq.transport.redis.store.whole_queue import (
    former_homes,
    is_current,
    purge,
    waiting_count,
    with_messages,
)
from celery_dq.transport.threaded_channel import handle_transient, queue_arguments, warn_of_ignored
from celery_dq.transport.threaded_transport import ThreadedTransport

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
    #: Why queues are consumed as before, although their maps have changed.
    _unfollowed: dict[str, str]
    #: Monotonic time until which the partitions are not looked at, after a refusal.
    _resumes_at: float
    #: Queue, callback and ``no_ack`` of the consumers that were asked for and have not begun, by their tags.
    _starting: dict[str, tuple[str, Callable[[Any], Any], bool]]
    #: The consumers of each transient queue: ``no_ack`` and callback, by their tags.
    _transient_consumers: dict[str, dict[str, tuple[bool, Callable[[Any], Any]]]]
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
        return self.context.state.capacity

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
                try:
                    self.queues(name, refresh=True)
                    self._unfollowed.pop(name, None)
                except ConfigurationError as exc:  # noqa: PERF203 - each by itself
                    self._log_not_followed(name, exc)
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
            self._log_not_followed(queue.whole_name, exc)
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

    def _log_not_followed(self, name: str, error: ConfigurationError) -> None:
        """Log why a queue is consumed as before, once: each heartbeat finds its map in doubt again."""
        if self._unfollowed.get(name) != str(error):
            self._unfollowed[name] = str(error)
            logger.error(
                "Worker %s consumes queue %s as before, although its number of partitions has changed: %s.",
                self.identity.consumer,
                name,
                error,
                extra={"event": "partitions_not_followed", "queue": name},
            )

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
            self._transient_consumers.setdefault(queue, {})[consumer_tag] = (no_ack, callback)
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
        if queue in self._transient_consumers:
            self._cancel_transient(queue, consumer_tag)
            return
        self._starting.pop(consumer_tag, None)
        self.consumer.stop_consumer(consumer_tag)
        VirtualChannel.basic_cancel(self, consumer_tag)

    def _cancel_transient(self, queue: str, consumer_tag: str) -> None:
        consumers = self._transient_consumers[queue]
        del consumers[consumer_tag]
        if not consumers:
            del self._transient_consumers[queue]
            thread, key = self.identity.threads, self.transients.key(queue)
            thread.run_between_trips(partial(self.consumer.claims.unlisten, key), 1.0)
        VirtualChannel.basic_cancel(self, consumer_tag)
        if consumers:
            # Kombu calls the last consumer of a queue, and none after the end of any of them.
            last, (no_ack, callback) = next(reversed(consumers.items()))
            VirtualChannel.basic_cancel(self, last)
            VirtualChannel.basic_consume(self, queue, no_ack, callback, last)

    # -- acknowledging

    def send_acks_now(self, held: InFlightMessage | None = None) -> None:
        """Wait for the confirmation of an ack, in a program that does not wait for messages now.

        Args:
            held: The message; None if it has ended before.

        Raises:
            redis.ConnectionError: The broker did not answer. The ack stays pending.
        """
        consumer = self.consumer
        if held is None or self.capacity is not None or consumer.is_asked:
            return
        if not consumer.flush(held):
            raise redis.ConnectionError("Redis did not confirm an acknowledgement, which is sent again")

    def _send_acks(self) -> None:
        self.consumer.flush()

    def _on_connection_disconnect(self, connection: Any) -> None:
        """Do nothing: the consumer thread looks after its connections."""


class DeclaredAhead:
    """The queues and bindings that a channel has declared, and kombu has not.

    Args:
        channel: The channel.
    """

    def __init__(self, channel: ConsumingChannel) -> None:
        self._channel = channel
        self._is_done = False
        #: Number of waiting messages, by the names of the queues that kombu has not declared yet.
        self._sizes: dict[str, int] = {}
        #: Bindings that kombu has not written yet: exchange and member of its table.
        self._bindings: set[tuple[str, str]] = set()
        #: Prefixes of the partitions that stored no message.
        self._empty: set[str] = set()

    def declare_with(self, queue: str | None, passive: bool) -> None:
        """Declare a queue of the app, once with all others that the worker consumes if it is one of them.

        Args:
            queue: The queue that kombu declares.
            passive: Whether kombu only asks for it, and so needs an answer of now.

        Raises:
            redis.ConnectionError: The connection broke.
        """
        channel = self._channel
        if passive:
            self.forget(queue or "")
            return
        if queue is None or self.size(queue) is not None:
            return  # it has no name yet, or was declared with another one
        consumed = [] if self._is_done else self._consumed_with(queue)
        self._is_done = self._is_done or bool(consumed)
        queues = consumed or [channel.context.app_context.queue_named(queue)]
        suitable = [each for each in queues if each is not None and self._suits(each)]
        try:
            run_rounds(channel.client, [self._declare(each, begins=bool(consumed)) for each in suitable])
        except (redis.ResponseError, ConfigurationError):
            self.clear()  # kombu's own declaration of that queue meets the error again

    def _consumed_with(self, queue: str | None) -> list[Any]:
        """Return all queues that the worker consumes if this is one of them."""
        channel = self._channel
        consumed_queues = channel.context.state.consumed_queues
        queues = [] if consumed_queues is None else list(consumed_queues(channel.connection.client))
        return queues if any(each.name == queue for each in queues) else []

    def _suits(self, queue: Any) -> bool:
        """Return whether kombu would declare and bind a queue as :meth:`_declare` does."""
        lasts = not (queue.auto_delete or queue.expires or "x-expires" in (queue.queue_arguments or {}))
        is_plain = not (queue.no_declare or queue.bindings) and self._channel.context.is_whole(queue.name)
        return bool(lasts and is_plain and queue.exchange.name and queue.exchange.type == "direct")

    def _declare(self, queue: Any, *, begins: bool) -> Rounds[None]:
        """Declare one queue.

        Args:
            queue: A kombu queue.
            begins: Whether consumers begin now, which need not look into an empty partition.
        """
        channel, exchange = self._channel, queue.exchange.name
        member = channel.sep.join([queue.routing_key or "", "", queue.name])
        members = [
            (channel.context.registry_key, queue.name),
            (channel.keyprefix_queue % (exchange,), member),
            (channel.keyprefix_binding_permanent % (exchange,), member),
        ]
        calls = [channel.context.partition(queue.name, 0, PartitionMap()).depth()]
        leaderships = channel.context.leaderships
        # A singleton queue may have too many partitions, and is not declared then.
        later = members if leaderships is not None and leaderships.is_singleton(queue.name) else []
        put = partial(_put, members=[] if later else members, calls=calls)
        found, answers = yield from channel.context.declared(queue.name, channel.client, put)
        answers = answers[0 if later else len(members) :]
        others = [each.partition.depth() for each in found.partitions[1:]]
        if others or later:
            calls += others
            answers += (yield partial(_put, members=later, calls=others))[len(later) :]
        left, size = iter(answers), 0
        for each, call in zip(found.partitions, calls, strict=True):
            counts = [next(left) for _ in call.commands]
            size += call.parse(counts)
            if begins and not counts[0]:
                self._empty.add(each.prefix)
        self._sizes[queue.name] = size
        self._bindings.add((exchange, member))

    def size(self, queue: str) -> int | None:
        """Return how many messages wait in a queue that was declared ahead; None for other queues."""
        return self._sizes.get(queue)

    def was_empty(self, partition: Queue) -> bool:
        """Return whether a partition that was declared ahead stored no message then."""
        return partition.prefix in self._empty

    @property
    def has_empty(self) -> bool:
        """Whether :meth:`was_empty` is true of any partition."""
        return bool(self._empty)

    def forget(self, queue: str) -> None:
        """Note that kombu declares a queue by itself from now on."""
        self._sizes.pop(queue, None)

    def take_binding(self, exchange: str, member: str) -> bool:
        """Return whether a binding was written ahead, once."""
        was_written = (exchange, member) in self._bindings
        self._bindings.discard((exchange, member))
        return was_written

    def clear(self) -> None:
        """Let kombu declare all queues by itself."""
        self._sizes.clear()
        self._bindings.clear()
        self._empty.clear()


def _put(pipe: Any, *, members: list[tuple[str, str]], calls: list[DepthCall]) -> None:
    for key, member in members:
        pipe.sadd(key, member)
    for call in calls:
        for command in call.commands:
            pipe.execute_command(*command)


class Channel(ConsumingChannel):
    """A channel whose queues hold tenants."""

    QoS = QoS
    queue_bind = refusals_named()(ConsumingChannel.queue_bind)
    supports_batch_publish = True
    ahead: DeclaredAhead
    #: Seconds. A hung server must not hang its clients, but by default kombu waits without a limit.
    socket_timeout = 15.0
    socket_connect_timeout = 5.0
    socket_keepalive = True
    max_connections = 50
    #: Kombu uses these two since version 5.7.
    keyprefix_binding_permanent = "_kombu.binding_permanent.%s"
    keyprefix_binding_deadlines = "_kombu.binding_deadlines"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.context: ConnectionContext = args[0].context
        self.identity: ConsumerIdentity = self.context.identity
        self.in_flight: InFlightMessages = self.identity.in_flight
        self.transients = TransientQueues(self.context.list_prefix)
        self._queues: dict[str, PartitionedQueue] = {}
        self._broadcasts = None
        self._starting = {}
        self._transient_consumers = {}
        self.ahead = DeclaredAhead(self)
        self._broken = False
        self._seen_partitions = self.identity.partition_maps.changes
        self._gone_partitions: set[str] = set()
        self._unfollowed = {}
        self._resumes_at = -math.inf
        self._registered = False
        self._apply_environment_prefix()
        with refusals_as_outage(), connection_refusals_named():
            super().__init__(*args, **kwargs)
        options = self.context.options
        self.consumer = ChannelDelivery(
            self, self.identity, options.claim_ahead_us / 1e6, options.watchdog_us / 1e6
        )
        self.publisher = RedisPublisher(
            lambda: self.pool,
            options,
            self.identity.clock,
            self.queues,
            self.context.queue_of,
            self.identity.partition_maps,
        )
        with refusals_as_outage():
            self.context.check_server(self.client)

    # -- parts, queues ---------------------------------------------------------

    def running_tags(self) -> frozenset[str]:
        """Return the delivery tags of messages whose tasks the worker's pool runs or will run."""
        return self.capacity.running_tags() if self.capacity else frozenset()

    def queues(self, name: str, refresh: bool = False) -> PartitionedQueue:
        """Return the queue called *name* with its partitions, or one partition, such as ``push/3``.

        Args:
            name: Name of the queue or partition.
            refresh: Ask the broker again for the number of partitions.

        Raises:
            ConfigurationError: The queue has fewer partitions than the name says.
            redis.RedisError: Redis did not answer.
        """
        found = None if refresh else self._queues.get(name)
        if found is None or found.homes is not self.identity.partition_maps.get(found.whole_name):
            found = self._queues[name] = self.context.queues(name, self.client, refresh=refresh)
        return found

    def partitions(self, name: str) -> tuple[Partition, ...]:
        """Return the partitions of the queue called *name*, in the order of their numbers."""
        return tuple(each.partition for each in self.queues(name).partitions)

    def home(self, name: str, tenant: str) -> Queue:
        """Return the partition of the queue called *name* in which *tenant* lives."""
        return self.queues(name).home(tenant)

    def partition(self, name: str) -> Partition:
        """Return the first partition of the queue called *name*; a singleton queue has no other one."""
        return self.queues(name).partitions[0].partition

    @refusals_named()
    def is_transient(self, queue: str) -> bool:
        """Return whether *queue* ends with its consumer; see :class:`TransientQueues`."""
        return self.transients.exists(self.client, queue)

    # -- declaring -------------------------------------------------------------

    def prepare_queue_arguments(self, arguments: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
        """Return the arguments of a queue together with those of kombu's ``Queue``, such as ``expires``."""
        return queue_arguments(arguments, options)

    @waits_for_redis
    def queue_declare(self, queue: str | None = None, passive: bool = False, **kwargs: Any) -> Any:
        """Declare *queue*; with the first one that a worker consumes, all others are declared."""
        self.ahead.declare_with(queue, passive)
        declared = super().queue_declare(queue, passive=passive, **kwargs)
        self.ahead.forget(declared.queue)
        return declared

    def _new_queue(self, queue: str, auto_delete: bool = False, durable: bool = True, **kwargs: Any) -> None:
        super()._new_queue(queue, auto_delete=auto_delete, **kwargs)
        arguments = kwargs.get("arguments") or {}
        if auto_delete and (not durable or arguments.get("x-expires")):
            if queue not in self._fanout_queues:
                self.transients.declare(self.client, queue, arguments)
        else:
            warn_of_ignored(queue, arguments)
            self.transients.declare_durable(queue)
            if self.ahead.size(queue) is None:
                add_member(self.client, self.context.registry_key, self.queues(queue).whole_name)

    @waits_for_redis
    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        member = self.sep.join([routing_key or "", pattern or "", queue or ""])
        if self.ahead.take_binding(exchange, member):
            return
        try:
            super()._queue_bind(exchange, routing_key, pattern, queue)
        except redis.ResponseError as exc:
            if not is_full(exc):
                raise
            add_member(self.client, self.keyprefix_queue % (exchange,), member)
            if queue not in getattr(self, "_expires", ()):
                add_member(self.client, self.keyprefix_binding_permanent % (exchange,), member)

    @cached_property
    def _refresh_binding(self) -> Callable[..., Any]:
        """Kombu's script for the binding of a queue that expires, since version 5.7.

        It is sent with its source: when other clients flush the scripts all the time, redis-py's second
        attempt finds it unknown again.
        """
        source = super()._refresh_binding.script

        def refresh(keys: Sequence[str], args: Sequence[Any], client: Any) -> Any:
            return client.eval(source, len(keys), *keys, *args)

        return refresh

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        if self.transients.is_declared(queue) or queue in self._fanout_queues:
            return True
        if self.transients.exists(self.client, queue):
            return True
        return bool(self.client.sismember(self.context.registry_key, self.queues(queue).whole_name))

    def get_table(self, exchange: str) -> list[tuple[str, ...]]:
        """Return the bindings of *exchange* from Redis or, if they are gone, those of this process.

        Without bindings, as after an eviction or a flush, kombu would drop the message silently.
        """
        table: list[tuple[str, ...]] = super().get_table(exchange)
        if not table:
            table = list(self.state.exchanges.get(exchange, {}).get("table", ()))
        return table

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> None:
        """Delete *queue* with its messages, also one that was declared elsewhere."""
        self.ahead.clear()  # its size may have changed, and its declaration ends
        if if_empty and self._size(queue):
            return
        super().queue_delete(queue, if_unused=if_unused, if_empty=if_empty, **kwargs)
        self._drop(queue)

    def _delete(
        self, queue: str, exchange: str, routing_key: str, pattern: str, *args: Any, **kwargs: Any
    ) -> None:
        self.auto_delete_queues.discard(queue)
        member = self.sep.join([routing_key or "", pattern or "", queue or ""])
        with self.client.pipeline(transaction=False) as pipe:
            pipe.srem(self.keyprefix_queue % (exchange,), member)
            pipe.srem(self.keyprefix_binding_permanent % (exchange,), member)
            pipe.execute()

    def _drop(self, queue: str) -> None:
        if queue in self._fanout_queues:
            return
        if self.transients.exists(self.client, queue):
            self.transients.delete(self.client, queue)
        else:
            self._purge(queue)
            if not self.queues(queue).is_pinned:
                self.client.srem(self.context.registry_key, queue)

    def _size(self, queue: str) -> int:
        if queue in self._fanout_queues:
            return 0
        if self.transients.exists(self.client, queue):
            return self.transients.size(self.client, queue)
        ahead = self.ahead.size(queue)
        if ahead is not None:
            return ahead
        return waiting_count(self.queues(queue, refresh=True), self.client)

    def _purge(self, queue: str) -> int:
        self.ahead.forget(queue)  # its size is another one now
        if self.transients.exists(self.client, queue):
            return self.transients.purge(self.client, queue)
        partitions = [each.partition for each in self.queues(queue, refresh=True).partitions]
        return sum(chain(purge(former_homes(partitions), self.client), purge(partitions, self.client)))

    # -- publishing ------------------------------------------------------------

    @refusals_named()
    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any) -> Any:
        """Publish a message exactly once: the stamps of a failed attempt stay on the message.

        Args:
            message: Message made by ``prepare_message`` of kombu.
            exchange: Name of the exchange.
            routing_key: Routing key.
            **kwargs: Further arguments of kombu.

        Raises:
            redis.ConnectionError: The channel was closed. A declaration before the publish may have made
                kombu connect again; kombu then publishes on the new channel.
            BrokerRefused: The server refused the message; nothing was stored.
        """
        if self.closed:
            raise redis.ConnectionError("The channel was closed: publish on a new one")
        result = super().basic_publish(message, exchange, routing_key, **kwargs)
        message["properties"].pop(STAMPS, None)
        return result

    def _inplace_augment_message(self, message: dict[str, Any], exchange: str, routing_key: str) -> None:
        # The body is not encoded: a record holds raw bytes, and base64 would make it a third longer.
        message["properties"]["delivery_info"].update(exchange=exchange, routing_key=routing_key)

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        if self.transients.exists(self.client, queue):
            self.transients.push(self.client, queue, self._as_json(message))
            return
        stamped = self.publisher.stamp(queue, message)
        batch: RedisPublishBatch | None = kwargs.get("_publish_batch")
        if batch is not None:
            batch.add(stamped)
        else:
            self.publisher.push([stamped])

    def create_publish_batch(self, max_size: int) -> RedisPublishBatch:
        """Return a batch for ``Producer.batch()`` of kombu, which is flushed after *max_size* messages."""
        return RedisPublishBatch(self, max_size)

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any) -> None:
        kwargs.pop("_publish_batch", None)
        super()._put_fanout(exchange, self._as_json(message), routing_key, **kwargs)

    def _as_json(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return *message* in the JSON form of kombu's own Redis transport, with the body in base64."""
        body, encoding = self.encode_body(message["body"], "base64")
        ours = (STAMPS, DEDUP_PROPERTY, COUNTDOWN, CONTINUES)
        sent = {key: each for key, each in message["properties"].items() if key not in ours}
        properties = dict(sent, body_encoding=encoding, delivery_tag=self._next_delivery_tag())
        return dict(message, body=body, properties=properties)

    # -- consuming -------------------------------------------------------------

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """Return one message at once, or None. Cancelled and unreadable messages are passed over."""
        self.context.refuse_inherited()
        if self.transients.exists(self.client, queue):
            return super().basic_get(queue, no_ack=no_ack, **kwargs)
        for refresh in (False, True):
            queues = self.queues(queue, refresh=refresh)
            # An empty queue costs two round trips, however many partitions it has.
            targets = queues.partitions if len(queues.partitions) == 1 else with_messages(queues, self.client)
            for target in targets:
                message = self._get_from(target, no_ack)
                if message is not None:
                    return message
            if is_current(queues, self.client):
                break
        return None

    def _get_from(self, target: Queue, no_ack: bool) -> Message | None:
        self.identity.threads.keep_lease(target, self.thread_clients)
        try:
            while taken := self.identity.claim_one(self.client, target):
                for entry, tag in taken:
                    if entry.reason:
                        self.in_flight.finish(tag)
                entry, tag = taken[0]
                if entry.reason:
                    continue
                try:
                    message = Message(MessageRecord.unpack(entry.record), entry, tag, target.name, self)
                except CorruptRecord as exc:
                    self.qos.dead_letter_unreadable(target.name, entry, tag, exc)
                    continue
                message.started = True
                if no_ack:
                    held = self.in_flight.finish(tag)
                    with suppress(redis.ConnectionError):  # the caller has the message; the ack is sent again
                        self.send_acks_now(held)
                else:
                    self.qos.append(message, tag)
                return message
        finally:
            self.identity.threads.drop_lease(target, soon=False)
        return None

    def _get(self, queue: str, timeout: float | None = None) -> Any:
        if not self.transients.exists(self.client, queue):
            raise Empty
        return self.transients.pop(self.client, queue)

    def message_to_python(self, raw_message: Any) -> Any:
        """Return messages of partitions as they are; kombu makes all others from their payload."""
        if isinstance(raw_message, Message):
            return raw_message
        return super().message_to_python(raw_message)

    # -- acknowledging ---------------------------------------------------------

    def requeue_transient(self, message: Any) -> None:
        """Requeue a message of a transient queue, at the end of its list."""
        for queue in self._lookup(message.delivery_info["exchange"], message.delivery_info["routing_key"]):
            raw = dict(message._raw, headers=dict(message.headers, redelivered=True))
            raw["properties"]["delivery_info"]["redelivered"] = True
            if self.transients.exists(self.client, queue):
                self.transients.push(self.client, queue, raw)

    # -- closing ---------------------------------------------------------------

    def abandon(self) -> None:
        """Mark the connection as lost, so that :meth:`close` does not wait for it."""
        self._broken = True

    def close(self) -> None:
        """Release all messages that are not running, send all pending acks, and disconnect."""
        if not self.closed and not self.identity.owner.is_current:
            # In a forked child, the in-flight messages and the sockets belong to the parent.
            self.closed = True
            self.connection.close_channel(self)
            return
        if not self.closed and hasattr(self, "consumer"):
            self._closing = True
            self.consumer.close()
            if self._qos is not None:
                self._qos.restore_unacked_once()
            if not self._broken:
                try:
                    self._send_acks()
                    self.identity.threads.end_leases_soon()  # leases end now that nothing is held under them
                    self._delete_transients()
                    self.publisher.retire(self.client)
                except (redis.RedisError, OSError) as exc:
                    logger.warning(
                        "Redis did not answer while a channel was closed (%s). The consumer thread sends "
                        "the pending acks.",
                        exc,
                        extra={"event": "channel_closed_without_answer"},
                    )
            else:
                # Kombu would delete these queues over the broken connection.
                self.auto_delete_queues.clear()
            self.publisher.close()
        super().close()

    def _delete_transients(self) -> None:
        for queue in list(self.auto_delete_queues):
            if self.transients.is_declared(queue):
                self.transients.delete(self.client, queue)


def _trust(wanted: Any) -> dict[str, Any]:
    """Return the TLS options when ``broker_use_ssl`` is True, or is not set beside ``dq-rediss://``."""
    if wanted:
        # broker_use_ssl = True trusts the certificate authorities of the system. Kombu would not encrypt.
        # Releases of redis-py before 6 do not compare the name of the host by themselves.
        return {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True}
    # The default of kombu for rediss://, and as unsafe.
    logger.warning(
        "dq-rediss:// encrypts, but does not verify the certificate of the server, so any server is trusted. "
        'Set broker_use_ssl = {"ssl_cert_reqs": "required", "ssl_ca_certs": "…"}, or True for the system\'s '
        "authorities, or add ?ssl_cert_reqs=required&ssl_ca_certs=… to the URL.",
        extra={"event": "tls_without_verification"},
    )
    return {"ssl_cert_reqs": ssl.CERT_NONE}


def _refuse_unknown(options: Mapping[str, object]) -> None:
    """Refuse TLS options that redis-py would refuse with a ``TypeError`` at each connection.

    Raises:
        ConfigurationError: There is such an option.
    """
    known = option_names(redis.SSLConnection)
    for name in sorted(str(each) for each in options if each not in known):
        close = get_close_matches(name, known, 1) or get_close_matches(f"ssl_{name}", known, 1)
        remedy = f"did you mean {close[0]!r}?" if close else "remove it."
        raise ConfigurationError(
            f"broker_use_ssl has no option {shown_name(name)!r}; {remedy} It takes the TLS options of "
            "redis-py, such as ssl_ca_certs, ssl_certfile, ssl_keyfile and ssl_password"
        )


class Cycle:
    """The part of kombu's poller that its Redis channels call."""

    _in_protected_read = False

    def __init__(self) -> None:
        self.after_read: set[Any] = set()

    def add(self, channel: Any) -> None:
        """Do nothing: the channel is consumed by a thread."""

    discard = add

    def close(self) -> None:
        """Do nothing: each channel ends its own part."""


class Transport(ThreadedTransport, RedisTransport):
    """The kombu transport of the tenant broker.

    Args:
        client: The kombu connection.
        **kwargs: Further arguments of kombu.
    """

    Channel = Channel
    #: Celery compares this name; mingle, gossip and --disable-prefetch depend on it.
    driver_type = "redis"
    driver_name = "redis"
    #: Without the KeyError of kombu 5.7: a message without a part raises one, and would end each connection.
    connection_errors = (
        *(each for each in RedisTransport.connection_errors if not issubclass(each, LookupError)),
        *PASSING_ERRORS,
    )
    #: Without this, kombu raises the second failure in a row despite the retry policy.
    recoverable_connection_errors = connection_errors
    implements = RedisTransport.implements.extend(asynchronous=True, batch_publish=True)
    supports_batch_publish = True

    def __init__(self, client: Any, **kwargs: Any) -> None:
        self.context = ConnectionContext(client)
        super().__init__(client, **kwargs)
        self.cycle = Cycle()
        # Kombu encrypts only with options, so a dict without any counts as one that is not set.
        if (client.ssl or client.transport_cls == "dq-rediss") and not (
            client.ssl and isinstance(client.ssl, dict)
        ):
            client.ssl = _trust(client.ssl)
        if client.ssl:
            _refuse_unknown(client.ssl)

    def start_fetcher(self) -> Any:
        """Do nothing: the thread starts with the first consumer."""

    def refuse_inherited(self) -> None:
        """Refuse to use a connection that was inherited through a fork; raises a connection error."""
        self.context.refuse_inherited()

    def acks_changed(self) -> None:
        """Deliver, if a message may be delivered now that an ack is pending or confirmed."""
        for channel in tuple(self.channels):
            consumer = channel.consumer
            if consumer.claims.has_queues and consumer.has_undelivered:
                self.wake_delivery()
                return

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """See the base class."""
        channels = tuple(self.channels)
        for channel in channels:
            channel.consumer.begin_asking()
        try:
            super().drain_events(connection, timeout)
        finally:
            for channel in channels:
                channel.consumer.is_asked = False

    def _deliver_all(self) -> None:
        for channel in tuple(self.channels):
            channel.tick()
            if channel.consumer.singleton_delivery is not None:
                channel.consumer.start_ready()
        super()._deliver_all()

    def _deliver_one(self) -> bool:
        for channel in tuple(self.channels):
            if channel.consumer.failure is not None or self._loop is None:
                channel.tick()
            if channel.consumer.deliver_one():
                if len(self.channels) > 1 and channel in self.channels:  # the callback may have closed it
                    self.channels.remove(channel)
                    self.channels.append(channel)
                return True
        return False

    def close_connection(self, connection: Any) -> None:
        """Close all channels."""
        self.context.identity.in_flight.remove_listener(self.acks_changed)
        VirtualTransport.close_connection(self, connection)
        self._waker.close()
        self._woken.close()

    def flush(self) -> None:
        """Do nothing: each channel waits for its own acks."""

    def _collect(self, connection: Any) -> None:
        """Close a lost connection without sending anything to the server."""
        for channel in (*self.channels, *self._avail_channels):
            channel.abandon()
        self.close_connection(connection)
