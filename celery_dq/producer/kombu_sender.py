"""A sender for all brokers of kombu. It uses batches and confirms where the transport has them.

Such a broker does not recognise a resent message. When the connection is lost, the unconfirmed messages, one
batch at most, may be delivered twice.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kombu import Exchange, Queue
from kombu.exceptions import OperationalError
from kombu.utils.json import dumps, loads

from celery_dq.clock import Clock, SystemClock
from celery_dq.compat.kombu_messages import is_py_amqp, publish_prepared, publish_without_waiting
from celery_dq.errors import CorruptRecord, DQError, InvalidMessage, described
from celery_dq.lost_attempts import means_too_large
from celery_dq.producer.buffer import BufferedMessage
from celery_dq.producer.sender import (
    Addressed,
    BrokerUnreachable,
    PublishDeferred,
    PublishInterrupted,
    PublishRefused,
    Refusal,
)

__all__ = ["Confirms", "KombuSender", "unpack_headers"]

_HEAD = struct.Struct("<BI")
_TEXT = 1
_PARTS = {"to", "declare", "headers", "properties", "type", "at"}


class Nacked(DQError):
    """The broker does not accept a message, for example for a full queue with ``reject-publish``."""


class Confirms:
    """The publisher confirms of one channel of AMQP, on which no other code publishes.

    py-amqp waits for each message, which limits its rate to that of the broker's disk. Here one wait serves a
    batch.

    Args:
        channel: A fresh channel of py-amqp. From now on its ``basic_publish`` does not wait.
    """

    def __init__(self, channel: Any) -> None:
        channel.confirm_select()
        publish_without_waiting(channel)
        channel.events["basic_ack"].add(self._settle)
        channel.events["basic_nack"].add(self._nacked)
        #: The broker numbers the messages of a channel from 1 on.
        self._published = 0
        self._first = 1
        self._outstanding: set[int] = set()
        self._refused: set[int] = set()

    def begin(self) -> None:
        """Start a batch."""
        self._first = self._published + 1
        self._outstanding.clear()
        self._refused.clear()

    def published(self) -> None:
        """Count a message that was published on the channel."""
        self._published += 1
        # The confirm cannot have been read yet: answers are read in `wait`, or before a message is written.
        self._outstanding.add(self._published)

    @property
    def confirmed(self) -> int:
        """Count of confirmed messages, from the start of the batch."""
        missing = self._outstanding | self._refused
        return (min(missing) if missing else self._published + 1) - self._first

    def wait(self, drain: Callable[[], Any]) -> None:
        """Read answers until each message has one.

        Args:
            drain: Reads answers; raises when none comes in time.

        Raises:
            Nacked: The broker did not accept all messages.
        """
        while self._outstanding:
            drain()
        if self._refused:
            raise Nacked(f"the broker did not accept {len(self._refused)} of the messages")

    def _nacked(self, tag: int, multiple: bool) -> None:
        self._refused |= self._settle(tag, multiple)

    def _settle(self, tag: int, multiple: bool) -> set[int]:
        settled = {each for each in self._outstanding if each == tag or (multiple and each < tag)}
        self._outstanding -= settled
        return settled


def _unpack_meta(payload: bytes) -> tuple[int, int, dict[str, Any]]:
    """Return the flags of a packed message, the place of its body, and everything else.

    Raises:
        CorruptRecord: It cannot be read.
    """
    try:
        flags, length = _HEAD.unpack_from(payload)
        end = _HEAD.size + length
        meta: dict[str, Any] = loads(payload[_HEAD.size : end].decode("utf-8", "surrogatepass"))
        if not (type(meta["headers"]) is type(meta["properties"]) is dict and meta.keys() >= _PARTS):
            raise ValueError("a part is missing")
        return flags, end, meta
    except Exception as error:
        raise CorruptRecord.of("a buffered message", error) from error


def unpack_headers(payload: bytes) -> dict[str, Any]:
    """Return the headers of a packed message."""
    headers: dict[str, Any] = _unpack_meta(payload)[2]["headers"]
    return headers


class KombuSender:
    """See :class:`celery_dq.producer.sender.Sender`.

    Args:
        connect: Makes a connection, which this sender owns.
        make_producer: Makes a producer for a connection.
        queues: Returns the queue with a name; None for an unknown one.
        confirm_s: Seconds that may pass without a confirm; 0 sets no limit.
        clock: Its wall time measures how long a message with an expiration has waited.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        make_producer: Callable[[Any], Any],
        queues: Callable[[str], Queue | None],
        confirm_s: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        self._connect = connect
        self._make_producer = make_producer
        self._queues = queues
        self._connection: Any = None
        self._producer: Any = None
        self._confirms: Confirms | None = None
        self._confirm_s = confirm_s or None
        self._wall = (clock or SystemClock()).wall

    def address(self, message: dict[str, Any], exchange: str, routing_key: str, declare: Any) -> Addressed:
        """See :meth:`celery_dq.producer.sender.Sender.address`."""
        headers, properties, body = message["headers"], message["properties"], message["body"]
        flags = 0
        if isinstance(body, str):
            flags, body = _TEXT, body.encode("utf-8", "surrogatepass")
        try:
            meta = dumps(
                {
                    "to": [exchange, routing_key],
                    "declare": [_described(entity) for entity in declare or ()],
                    "headers": headers,
                    "properties": {key: value for key, value in properties.items() if key != "delivery_info"},
                    "type": [message["content-type"], message["content-encoding"]],
                    "at": self._wall(),
                }
            ).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidMessage(f"a header or property cannot be written as JSON: {error}") from error
        task_id = str(headers.get("id") or properties.get("message_id") or "")
        priority = properties.get("priority") or 0
        lane = f"k{priority}/{exchange}/{routing_key}"
        return Addressed(lane, task_id.encode()[:200], _HEAD.pack(flags, len(meta)) + meta + bytes(body))

    def send(self, lane: str, producer: str, messages: Sequence[BufferedMessage]) -> Sequence[Refusal]:
        """See :meth:`celery_dq.producer.sender.Sender.send`."""
        sent, is_open = 0, False
        try:
            publisher = self._open()
            is_open = True
            if getattr(publisher, "supports_batch_publish", False):
                with publisher.batch(max_size=max(len(messages), 1)):
                    for message in messages:
                        self._publish(publisher, message)
            elif self._confirms is not None:
                self._publish_and_confirm(publisher, self._confirms, messages)
            else:
                for message in messages:
                    self._publish(publisher, message)
                    sent += 1
        except Exception as error:
            sent = sent if self._confirms is None else self._confirms.confirmed
            if isinstance(error, (InvalidMessage, CorruptRecord, Nacked)):
                if sent or isinstance(error, Nacked):  # the broker has those before it
                    raise PublishDeferred(str(error), sent) from error
                raise PublishRefused(str(error)) from error
            lost = self._lost()
            # The state of the channel is unknown: a virtual channel of kombu stays open, an AMQP channel does
            # not.
            self.close()
            # The error of a batch of kombu has the reason as its cause.
            reason = error if isinstance(error, lost) else error.__cause__ or error
            if isinstance(reason, lost):
                # The timeouts of redis-py are not those of Python.
                timed_out = any("Timeout" in each.__name__ for each in type(reason).__mro__)
                kind = PublishInterrupted if is_open and not timed_out else BrokerUnreachable
                raise kind(described(reason), sent) from error
            if sent:
                raise PublishDeferred(described(reason), sent) from error
            if means_too_large(str(reason)):
                raise PublishRefused(described(reason)) from error
            raise
        return ()

    def _publish_and_confirm(
        self, publisher: Any, confirms: Confirms, messages: Sequence[BufferedMessage]
    ) -> None:
        drain = partial(self._connection.drain_events, timeout=self._confirm_s)
        confirms.begin()
        try:
            for message in messages:
                self._publish(publisher, message)
                confirms.published()
        except (InvalidMessage, CorruptRecord):
            confirms.wait(drain)  # the broker gets the messages before it
            raise
        confirms.wait(drain)

    def _lost(self) -> tuple[type[BaseException], ...]:
        errors: tuple[type[BaseException], ...] = (OperationalError, OSError)
        if self._connection is not None:
            errors += tuple(self._connection.recoverable_connection_errors)
        return errors

    def _open(self) -> Any:
        if self._producer is None:
            self._connection = self._connect()
            self._connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0, timeout=5)
            producer = self._make_producer(self._connection)
            if is_py_amqp(producer.channel):
                self._confirms = Confirms(producer.channel)
            self._producer = producer
        return self._producer

    def _publish(self, publisher: Any, message: BufferedMessage) -> None:
        flags, end, meta = _unpack_meta(message.payload)
        body: str | bytes = message.payload[end:]
        if flags & _TEXT:
            body = message.payload[end:].decode("utf-8", "surrogatepass")
        properties = meta["properties"]
        expiration = properties.get("expiration")
        if expiration is not None:
            # The expiration counts from the call, but AMQP counts from the publication.
            waited_ms = max(self._wall() - meta["at"], 0) * 1000
            properties["expiration"] = str(int(max(float(expiration) - waited_ms, 0)))
        publish_prepared(publisher)(
            body,
            properties.pop("priority", 0),
            *meta["type"],
            meta["headers"],
            properties,
            meta["to"][1],
            False,
            False,
            meta["to"][0],
            [entity for each in meta["declare"] if (entity := self._entity(each)) is not None],
        )

    def _entity(self, described: list[Any]) -> Any:
        kind, name, *details = described
        if kind == "queue":
            return self._queues(name)
        of_type, durable, auto_delete, delivery_mode = details
        return Exchange(name, of_type, durable=durable, auto_delete=auto_delete, delivery_mode=delivery_mode)

    def close(self) -> None:
        """See :meth:`celery_dq.producer.sender.Sender.close`."""
        connection, self._connection, self._producer = self._connection, None, None
        self._confirms = None
        if connection is not None:
            connection.collect(socket_timeout=1)


def _described(entity: Any) -> list[Any]:
    if isinstance(entity, Queue):
        return ["queue", entity.name]
    return ["exchange", entity.name, entity.type, entity.durable, entity.auto_delete, entity.delivery_mode]
