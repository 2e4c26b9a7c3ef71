"""The kombu channel of the tenant broker.

Kombu's own Redis channel provides connection parameters, TLS, Sentinel, credential providers, exchange
tables, and fanout by PUB/SUB. This class provides queueing, acknowledgement and waiting.

Two kinds of queues exist. An ordinary queue is a partition. A *transient* queue (``auto_delete``, and either
not durable or with ``x-expires``) is a plain Redis list that expires (``store/transient.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from queue import Empty
from typing import TYPE_CHECKING, Any

import redis

from celery_dq.errors import CorruptRecord
from celery_dq.protocols import COUNTDOWN, DEDUP_PROPERTY
from celery_dq.shown import shown_logger
from celery_dq.transport.in_flight.in_flight_messages import InFlightMessages
from celery_dq.transport.in_flight.message import Message, QoS
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.packer import STAMPS
from celery_dq.transport.redis.consuming.delivery import ChannelDelivery
from celery_dq.transport.redis.consuming_channel import ConsumingChannel, waits_for_redis
from celery_dq.transport.redis.declared_ahead import DeclaredAhead
from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.store.full_server import add_member, is_full
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.publisher import RedisPublishBatch, RedisPublisher
from celery_dq.transport.redis.store.queue import PartitionedQueue, Queue
from celery_dq.transport.redis.store.server_checks import connection_refusals_named
from celery_dq.transport.redis.store.server_errors import refusals_as_outage, refusals_named
from celery_dq.transport.redis.store.transient import TransientQueues
from celery_dq.transport.redis.store.whole_queue import purge, waiting_count, with_messages
from celery_dq.transport.threaded_channel import queue_arguments, warn_of_ignored

if TYPE_CHECKING:
    from celery_dq.transport.redis.connection_context import ConnectionContext

logger = shown_logger(__name__)


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
        self.ahead = DeclaredAhead(self)
        self._broken = False
        self._seen_partitions = self.identity.partition_maps.changes
        self._gone_partitions: set[str] = set()
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
        return waiting_count(self.queues(queue), self.client) if ahead is None else ahead

    def _purge(self, queue: str) -> int:
        self.ahead.forget(queue)  # its size is another one now
        if self.transients.exists(self.client, queue):
            return self.transients.purge(self.client, queue)
        return purge(self.queues(queue), self.client)

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
        ours = (STAMPS, DEDUP_PROPERTY, COUNTDOWN)
        sent = {key: each for key, each in message["properties"].items() if key not in ours}
        properties = dict(sent, body_encoding=encoding, delivery_tag=self._next_delivery_tag())
        return dict(message, body=body, properties=properties)

    # -- consuming -------------------------------------------------------------

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """Return one message at once, or None. Cancelled and unreadable messages are passed over."""
        self.context.refuse_inherited()
        if self.transients.exists(self.client, queue):
            return super().basic_get(queue, no_ack=no_ack, **kwargs)
        queues = self.queues(queue)
        # An empty queue costs one round trip, however many partitions it has.
        targets = queues.partitions if len(queues.partitions) == 1 else with_messages(queues, self.client)
        for target in targets:
            message = self._get_from(target, no_ack)
            if message is not None:
                return message
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
                    self.in_flight.finish(tag)
                    self.send_acks_now()
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
