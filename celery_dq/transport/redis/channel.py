"""The kombu channel of the tenant broker.

What is not queueing comes from kombu's own Redis channel: connection parameters,
TLS, Sentinel, credential providers, exchange tables, fanout by PUB/SUB. Queueing,
acknowledgement and waiting are ours.

Two kinds of queues exist. An ordinary one is a partition. A *transient* one
(not kept when its consumer goes, and not durable or with an expiry) is a plain Redis list that
expires; see :mod:`celery_dq.transport.redis.transient`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from functools import partial
from queue import Empty
from typing import TYPE_CHECKING, Any

import redis

from celery_dq.errors import CorruptRecord
from celery_dq.hooks import DEDUP, WorkerGate
from celery_dq.transport.bases import VirtualChannel
from celery_dq.transport.redis.driven import DrivenChannel
from celery_dq.transport.redis.fitness import old_servers_named
from celery_dq.transport.redis.intake import Intake
from celery_dq.transport.redis.ledger import Ledger
from celery_dq.transport.redis.message import Message
from celery_dq.transport.redis.partition import Partition
from celery_dq.transport.redis.process import Process
from celery_dq.transport.redis.publisher import STAMPS, PublishBatch, Publisher
from celery_dq.transport.redis.qos import QoS
from celery_dq.transport.redis.queue import Queue
from celery_dq.transport.redis.quotas import bring_settings
from celery_dq.transport.redis.record import Record
from celery_dq.transport.redis.replies import ClaimedEntry
from celery_dq.transport.redis.transient import Transients

if TYPE_CHECKING:
    from celery_dq.transport.redis.poller import Poller
    from celery_dq.transport.redis.session import Session

logger = logging.getLogger(__name__)
PURGE_CHUNK = 1000


class Channel(DrivenChannel):
    """A channel whose queues hold tenants."""

    QoS = QoS
    supports_batch_publish = True
    #: A hung server must not hang its clients (kombu waits for ever by default). Seconds.
    socket_timeout = 15.0
    socket_connect_timeout = 5.0
    socket_keepalive = True
    max_connections = 50
    #: Kombu has these since 5.7; before, they are never used.
    keyprefix_binding_permanent = "_kombu.binding_permanent.%s"
    keyprefix_binding_deadlines = "_kombu.binding_deadlines"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.session: Session = args[0].session
        self.process: Process = self.session.process
        self.poller: Poller = self.session.poller
        self.transients = Transients(self.session.list_prefix)
        self._queues: dict[str, Queue] = {}
        self._subscribed: set[str] = set()
        self._broken = False
        self._health_checked_at = self.process.clock.monotonic()
        self._registered = False
        self._separate()
        with old_servers_named():
            super().__init__(*args, **kwargs)
        options = self.session.options
        self.intake = Intake(self, self.process, options.claim_ahead_us / 1e6, options.watchdog_us / 1e6)
        self.publisher = Publisher(lambda: self.pool, options, self.process.clock)
        self.session.check_server(self.client)

    # -- what the others ask of a channel --------------------------------------

    @property
    def ledger(self) -> Ledger:
        """What the process holds."""
        return self.process.ledger

    @property
    def gate(self) -> WorkerGate | None:
        """The worker that this channel feeds; None in plain kombu."""
        return self.session.gate

    def running_tags(self) -> frozenset[str]:
        """Return the deliveries that the worker's pool runs or will run."""
        return self.gate.running_tags() if self.gate else frozenset()

    def queue(self, name: str) -> Queue:
        """Return the queue called *name* with its partition."""
        if name not in self._queues:
            self._queues[name] = self.session.queue(name)
        return self._queues[name]

    def partition(self, name: str) -> Partition:
        """Return the partition of the queue called *name*."""
        return self.queue(name).partition

    def own_clients(self, timeout_s: float = math.inf) -> Callable[[], redis.Redis]:
        """Return what makes clients for another thread; it outlives this channel.

        Arguments:
            timeout_s: seconds to wait for a connection or an answer, if those of the channel are longer.
        """
        # It is made for these clients, and no connection has been.
        pool = self._get_pool()
        for name in {"socket_timeout", "socket_connect_timeout"} & pool.connection_kwargs.keys():
            configured = pool.connection_kwargs[name]
            if timeout_s < (math.inf if configured is None else configured):
                pool.connection_kwargs[name] = timeout_s
        return partial(self.Client, connection_pool=pool)

    def keeper_clients(self) -> Callable[[], redis.Redis]:
        """Return what makes clients for the keeper's thread."""
        return self.own_clients(self.process.keeper.patience_s)

    # -- declaring -------------------------------------------------------------

    def _new_queue(self, queue: str, auto_delete: bool = False, durable: bool = True, **kwargs: Any) -> None:
        super()._new_queue(queue, auto_delete=auto_delete, **kwargs)
        arguments = kwargs.get("arguments") or {}
        if auto_delete and (not durable or arguments.get("x-expires")):
            if queue not in self._fanout_queues:
                self.transients.declare(self.client, queue, arguments)
        else:
            self.transients.declare_durable(queue)
            self.client.sadd(self.session.registry_key, queue)

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        if self.transients.knows(queue) or queue in self._fanout_queues:
            return True
        return bool(self.client.sismember(self.session.registry_key, queue)) or self.transients.holds(
            self.client, queue
        )

    def get_table(self, exchange: str) -> list[tuple[str, ...]]:
        """Return the bindings of *exchange*: those in Redis, or, where they are gone, our own.

        Kombu drops a message silently when the table was evicted or flushed.
        """
        table: list[tuple[str, ...]] = super().get_table(exchange)
        if not table:
            table = list(self.state.exchanges.get(exchange, {}).get("table", ()))
        return table

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> None:
        """Delete *queue* with its messages, also one that was declared elsewhere."""
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
        if self.transients.holds(self.client, queue):
            self.transients.delete(self.client, queue)
        else:
            self._purge(queue)
            self.client.srem(self.session.registry_key, queue)

    def _size(self, queue: str) -> int:
        if queue in self._fanout_queues:
            return 0
        if self.transients.holds(self.client, queue):
            return self.transients.size(self.client, queue)
        return self.session.depth(self.client, self.partition(queue))

    def _purge(self, queue: str) -> int:
        if self.transients.holds(self.client, queue):
            return self.transients.purge(self.client, queue)
        removed = 0
        while True:
            purged = self.partition(queue).purge(limit=PURGE_CHUNK).run(self.client)
            removed += purged.removed
            if not purged.more:
                return removed

    # -- publishing ------------------------------------------------------------

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any) -> Any:
        """Publish, once: the stamps of an attempt that failed stay on the message.

        Raises:
            redis.ConnectionError: the channel was closed. Kombu's declaring before a publish may have
                connected anew; it then publishes again on the new channel.
        """
        if self.closed:
            raise redis.ConnectionError("The channel was closed: publish on a new one")
        result = super().basic_publish(message, exchange, routing_key, **kwargs)
        message["properties"].pop(STAMPS, None)
        return result

    def _inplace_augment_message(self, message: dict[str, Any], exchange: str, routing_key: str) -> None:
        # The body stays as it is: a record holds raw bytes, and base64 costs a third.
        message["properties"]["delivery_info"].update(exchange=exchange, routing_key=routing_key)

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        if self.transients.holds(self.client, queue):
            self.transients.put(self.client, queue, self._as_json(message))
            return
        target = self.queue(queue)
        stamped = self.publisher.stamp(target, message)
        batch: PublishBatch | None = kwargs.get("_publish_batch")
        if batch is not None:
            batch.add(target, stamped)
        else:
            self.publisher.push(target, [stamped])

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        """Kombu's seam for ``Producer.batch()``."""
        return PublishBatch(self, max_size)

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any) -> None:
        kwargs.pop("_publish_batch", None)
        super()._put_fanout(exchange, self._as_json(message), routing_key, **kwargs)

    def _as_json(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return *message* as the JSON-able form that stock kombu sends: body in base64."""
        body, encoding = self.encode_body(message["body"], "base64")
        sent = {key: each for key, each in message["properties"].items() if key not in (STAMPS, DEDUP)}
        properties = dict(sent, body_encoding=encoding, delivery_tag=self._next_delivery_tag())
        return dict(message, body=body, properties=properties)

    # -- consuming -------------------------------------------------------------

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], Any], consumer_tag: str, **kwargs: Any
    ) -> None:
        """Consume *queue*; several consumers of one queue on a channel take turns."""
        self.session.refuse_inherited()
        if queue in self._fanout_queues:
            super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        elif self.transients.holds(self.client, queue):
            # Kombu's base class wraps the payload and calls back.
            VirtualChannel.basic_consume(self, queue, no_ack, callback, consumer_tag, **kwargs)
            self.intake.fetcher.listen(
                self.transients.key(queue),
                lambda raw: self.connection._deliver(self.transients.decode(raw), queue),
            )
        else:
            self._tag_to_queue[consumer_tag] = queue
            self._active_queues.append(queue)
            self._consumers.add(consumer_tag)
            if self.session.has_settings:
                quota = self.session.options.queue(queue).quota
                bring_settings(self.partition(queue), self.client, quota)
            self.session.attend()
            self.intake.start(self.queue(queue), consumer_tag, callback, no_ack)
        self.poller.wake()

    def basic_cancel(self, consumer_tag: str) -> None:
        """Stop a consumer. What it has not been given yet goes back to its place."""
        queue = self._tag_to_queue.get(consumer_tag)
        if queue is None:
            return
        if queue in self.active_fanout_queues:
            self._subscribed.clear()
            super()._basic_cancel(consumer_tag)
            return
        if self.transients.knows(queue):
            self.intake.fetcher.unlisten(self.transients.key(queue))
        else:
            self.intake.stop(queue, consumer_tag)
        VirtualChannel.basic_cancel(self, consumer_tag)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """Take one message at once, or None. What was cancelled or cannot be read is not one."""
        self.session.refuse_inherited()
        if self.transients.holds(self.client, queue):
            return super().basic_get(queue, no_ack=no_ack, **kwargs)
        target = self.queue(queue)
        self.process.keeper.use(target, self.keeper_clients)
        try:
            while taken := self.intake.claim_one(target):
                entry, tag = taken[0]
                try:
                    message = Message(Record.unpack(entry.record), entry, tag, queue, self)
                except CorruptRecord as exc:
                    self.bury_unreadable(target, entry, tag, exc)
                    continue
                if message.discard:
                    self.ledger.finish(tag)
                    continue
                message.started = True
                if no_ack:
                    self.ledger.finish(tag)
                    self.tell_now()
                else:
                    self.qos.append(message, tag)
                return message
        finally:
            self.process.keeper.leave(target, soon=False)
        return None

    def _get(self, queue: str, timeout: float | None = None) -> Any:
        if not self.transients.holds(self.client, queue):
            raise Empty
        return self.transients.get(self.client, queue)

    def message_to_python(self, raw_message: Any) -> Any:
        """Messages of partitions come as messages; kombu makes the others from their payload."""
        if isinstance(raw_message, Message):
            return raw_message
        return super().message_to_python(raw_message)

    # -- acknowledging ---------------------------------------------------------

    def basic_settle(self, delivery_tag: str) -> None:
        """Acknowledge before the task runs: never deliver it again, keep its slot."""
        self.qos.settle(delivery_tag)
        self._tell_at_the_end()

    def basic_finish(self, delivery_tag: str) -> None:
        """The task of an acknowledged message is over: free its slot."""
        self.qos.forget(delivery_tag)
        self.ledger.finish(delivery_tag)
        self._tell_at_the_end()

    def requeue_transient(self, message: Any) -> None:
        """Put a message of a transient queue back; at its end, as lists do."""
        for queue in self._lookup(message.delivery_info["exchange"], message.delivery_info["routing_key"]):
            raw = dict(message._raw, headers=dict(message.headers, redelivered=True))
            raw["properties"]["delivery_info"]["redelivered"] = True
            if self.transients.holds(self.client, queue):
                self.transients.put(self.client, queue, raw)

    def bury(self, message: Message, reason: str) -> None:
        """Keep *message* as a dead letter, with the reason, and finish it."""
        tag: str = message.delivery_tag
        self.qos.forget(tag)
        self.ledger.bury(tag, reason, message.record.pack())

    def bury_unreadable(self, queue: Queue, entry: ClaimedEntry, tag: str, why: CorruptRecord) -> None:
        """A stored message cannot be read: keep it as a dead letter and go on."""
        logger.error("Message %s of queue %s goes to the dead letters: %s.", entry.id, queue.name, why)
        self.ledger.bury(tag, f"unreadable: {why}", entry.record)

    # -- the end ---------------------------------------------------------------

    def abandon(self) -> None:
        """The connection is lost: :meth:`close` must not wait for it."""
        self._broken = True

    def close(self) -> None:
        """Give back what is not running, tell the broker what there is to tell, and disconnect."""
        if not self.closed and self.process.pid != os.getpid():
            # A child closes what it has inherited: what is held, and the sockets, are the parent's.
            self.closed = True
            self.connection.close_channel(self)
            return
        if not self.closed and hasattr(self, "intake"):
            self._closing = True
            self.poller.discard(self)
            self.intake.close()
            if self._qos is not None:
                self._qos.restore_unacked_once()
            if not self._broken:
                try:
                    self._tell()
                    self._delete_transients()
                    self.publisher.retire(self.client)
                except self.connection_errors as exc:
                    logger.warning("The broker could not be told at close (%s); the keeper will try.", exc)
            else:
                # Kombu would go and delete them.
                self.auto_delete_queues.clear()
            self.publisher.close()
        super().close()

    def _delete_transients(self) -> None:
        for queue in list(self.auto_delete_queues):
            if self.transients.knows(queue):
                self.transients.delete(self.client, queue)
