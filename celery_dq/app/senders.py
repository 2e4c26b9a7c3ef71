"""The sender of an app's buffered messages: to partitions by the push script, to other targets through kombu.

A message for a partition is packed as the record that the broker stores, so the flusher need not repack it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import redis

from celery_dq.app.timeouts import connection_with_timeout
from celery_dq.clock import SystemClock
from celery_dq.errors import ConfigurationError, InvalidMessage, TooFewReplicas, described
from celery_dq.options.sections import Options
from celery_dq.producer.buffer import BufferedMessage
from celery_dq.producer.kombu_sender import KombuSender, unpack_headers
from celery_dq.producer.sender import (
    Addressed,
    BrokerUnreachable,
    PublishDeferred,
    PublishInterrupted,
    PublishRefused,
    Refusal,
)
from celery_dq.protocols import CONTINUES, COUNTDOWN, DEDUP_HEADER, DEDUP_PROPERTY
from celery_dq.transport import envelope
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.packer import Packer
from celery_dq.transport.partition_replies import OutgoingRecord
from celery_dq.transport.redis.store.address import on_cluster
from celery_dq.transport.redis.store.server_checks import PASSING_ERRORS
from celery_dq.transport.redis.store.server_errors import (
    BrokerOverloaded,
    MessageRefused,
    PartitionsChanging,
    PushInterrupted,
)

#: Errors of a server that cannot take messages now. They are treated like a server that does not answer.
_PASSING: tuple[type[BaseException], ...] = (
    redis.ConnectionError,
    redis.TimeoutError,
    OSError,
    *PASSING_ERRORS,
    BrokerOverloaded,
)
#: Errors of one server, which say nothing about the other masters of a cluster.
_OF_ONE_SERVER: tuple[type[BaseException], ...] = (*PASSING_ERRORS, TooFewReplicas, BrokerOverloaded)


def lane_of(exchange: str, routing_key: str, priority: int, declare: Any) -> str:
    """Return the lane of messages for a partition; "" for messages to other targets.

    Args:
        exchange: Name of the exchange.
        routing_key: Name of the queue when there is no exchange.
        priority: Priority of the messages.
        declare: Entities to declare before; may be None.
    """
    if exchange or any(
        getattr(entity, "auto_delete", False) and not getattr(entity, "durable", True)
        for entity in declare or ()
    ):
        return ""
    return f"p{priority}/{routing_key}"


def headers_of(lane: str, payload: bytes) -> dict[str, Any]:
    """Return the headers of a packed message of a lane."""
    if lane.startswith("p"):
        return envelope.unpack(MessageRecord.unpack(payload).envelope)[0]
    return unpack_headers(payload)


class AppSender:
    """The sender of one app in one process; see :class:`celery_dq.producer.sender.Sender`.

    Args:
        app: a Celery app, on any broker.
        partitioned: whether the broker is one of celery-dq, whose queues are partitions.
        options: its settings.
    """

    def __init__(self, app: Any, *, partitioned: bool, options: Options) -> None:
        self._app = app
        self._step_s = options.publishing.step_s
        self._packer = Packer(options, SystemClock())
        self._partitioned = partitioned
        self._kombu = KombuSender(
            self._connect,
            lambda connection: app.amqp.Producer(connection, auto_declare=False),
            lambda name: app.amqp.queues.get(name),
            self._step_s,
        )
        self._connection: Any = None
        self._declared: set[str] = set()

    def _connect(self) -> Any:
        return connection_with_timeout(self._app, self._step_s)

    def address(self, message: dict[str, Any], exchange: str, routing_key: str, declare: Any) -> Addressed:
        """See :meth:`celery_dq.producer.sender.Sender.address`."""
        properties = message["properties"]
        lane = lane_of(exchange, routing_key, properties.get("priority") or 0, declare)
        if not self._partitioned or not lane:
            for ours in (COUNTDOWN, CONTINUES):
                properties.pop(ours, None)
            request = properties.pop(DEDUP_PROPERTY, None)
            if request is not None:
                # The worker that receives the message gives the verdict.
                message["headers"][DEDUP_HEADER] = request.dedup_header()
            return self._kombu.address(message, exchange, routing_key, declare)
        properties.setdefault("delivery_info", {}).update(exchange=exchange, routing_key=routing_key)
        packed = self._packer.pack(message, routing_key)
        return Addressed(lane, packed.id.encode(), packed.record)

    def send(self, lane: str, producer: str, messages: Sequence[BufferedMessage]) -> Sequence[Refusal]:
        """See :meth:`celery_dq.producer.sender.Sender.send`."""
        if not lane.startswith("p"):
            return self._kombu.send(lane, producer, messages)
        name = lane.partition("/")[2]
        try:
            channel = self._open()
            self._declare(channel, name)
            # A message has the fields of an `OutgoingRecord`, with an encoded id.
            outgoing = cast(Sequence[OutgoingRecord], messages)
            replies = channel.publisher.deliver(name, producer, outgoing, self._packer.marker_ttl_ms)
            if replies is None:
                return ()
            backlog_full = channel.publisher.backlog_full
            return [
                Refusal(place, backlog_full(name, messages[place].payload, reply), reply.waits)
                for place, reply in enumerate(replies)
                if reply.status == "full"
            ]
        except PushInterrupted as error:
            self.close()
            raise PublishInterrupted(str(error)) from error
        except PartitionsChanging as error:
            raise PublishDeferred(str(error)) from error
        except _PASSING as error:
            reason = str(error) if isinstance(error, BrokerOverloaded) else described(error)
            if isinstance(error, _OF_ONE_SERVER) and self._cluster_answers():
                raise PublishDeferred(reason) from error
            if not isinstance(error, BrokerOverloaded):
                self.close()
            raise BrokerUnreachable(reason) from error
        except (InvalidMessage, ConfigurationError, MessageRefused) as error:
            # Nothing but another call mends it, so the messages behind it must not wait.
            raise PublishRefused(str(error)) from error

    def _cluster_answers(self) -> bool:
        """Whether the broker is a cluster, and a node of it answers."""
        connection = self._connection
        if connection is None or not on_cluster(connection):
            return False
        try:
            connection.default_channel.client.ping()
        except (redis.RedisError, OSError):
            return False
        return True

    def _open(self) -> Any:
        if self._connection is None:
            connection = self._connect()
            try:
                connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0, timeout=5)
                connection.default_channel  # noqa: B018 - opens it
            except Exception as error:
                connection.collect(socket_timeout=1)
                raise redis.ConnectionError(str(error)) from error
            self._connection = connection
            self._declared.clear()
        return self._connection.default_channel

    def _declare(self, channel: Any, name: str) -> None:
        """Declare the queue, as every publish of Celery does, once per connection."""
        if name not in self._declared:
            queue = self._app.amqp.queues.get(name)
            if queue is not None:
                queue(channel).declare()
            self._declared.add(name)

    def close(self) -> None:
        """See :meth:`celery_dq.producer.sender.Sender.close`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.collect(socket_timeout=1)
        self._kombu.close()
