"""How an app's buffered messages reach its broker: partitions by their own script, the rest through kombu.

A message for a partition is packed as the record that the broker stores, so the flusher only hands it on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import redis

from celery_dq.app.punctual import punctual_connection
from celery_dq.clock import SystemClock
from celery_dq.errors import InvalidMessage
from celery_dq.hooks import CLAIM_HEADER, DEDUP
from celery_dq.producer.buffer import Message
from celery_dq.producer.kombu_sender import KombuSender
from celery_dq.producer.sender import Addressed, Refused, Unreachable
from celery_dq.transport.redis.fitness import PASSING_ERRORS
from celery_dq.transport.redis.publisher import stamp
from celery_dq.transport.redis.replies import Outgoing

__all__ = ["AppSender", "partition_lane"]

#: The server cannot take anything now: like one that does not answer.
_PASSING: tuple[type[BaseException], ...] = (
    redis.ConnectionError,
    redis.TimeoutError,
    OSError,
    *PASSING_ERRORS,
)
#: How Redis says that its memory is full; not every redis-py has a class for it.
_FULL = "command not allowed when used memory"


def partition_lane(queue: str, priority: int) -> str:
    """The lane of a queue's messages of one priority."""
    return f"p{priority}/{queue}"


class AppSender:
    """The sender of one app in one process; see :class:`celery_dq.producer.sender.Sender`.

    :param app: a Celery app, on any broker.
    :param partitioned: whether the broker is one of celery-dq, whose queues are partitions.
    :param step_s: seconds that one step on a connection may take; 0 is for ever.
    """

    def __init__(self, app: Any, *, partitioned: bool, step_s: float = 0.0) -> None:
        self._app = app
        self._step_s = step_s
        self._partitioned = partitioned
        self._kombu = KombuSender(self._connect, self._make_producer, self._queue, step_s)
        self._wall = SystemClock().wall
        self._connection: Any = None
        self._declared: set[str] = set()

    def _connect(self) -> Any:
        return punctual_connection(self._app, self._step_s)

    def _make_producer(self, connection: Any) -> Any:
        return self._app.amqp.Producer(connection, auto_declare=False)

    def _queue(self, name: str) -> Any:
        return self._app.amqp.queues.get(name)

    def address(self, message: dict[str, Any], exchange: str, routing_key: str, declare: Any) -> Addressed:
        """See the protocol."""
        if not self._partitioned or exchange or _any_transient(declare):
            ticket = message["properties"].pop(DEDUP, None)
            if ticket is not None:
                # The worker that receives it gives the verdict.
                message["headers"][CLAIM_HEADER] = ticket.claim_header()
            return self._kombu.address(message, exchange, routing_key, declare)
        message["properties"].setdefault("delivery_info", {}).update(
            exchange=exchange, routing_key=routing_key
        )
        outgoing = stamp(message, routing_key, "", int, int(self._wall() * 1_000_000)).outgoing
        priority = message["properties"].get("priority") or 0
        return Addressed(partition_lane(routing_key, priority), outgoing.id.encode(), outgoing.record)

    def send(self, lane: str, producer: str, messages: Sequence[Message]) -> None:
        """See the protocol."""
        if not lane.startswith("p"):
            self._kombu.send(lane, producer, messages)
            return
        name = lane.partition("/")[2]
        try:
            channel = self._open()
            self._declare(channel, name)
            # A message is laid out as an `Outgoing`, with an id that needs no encoding any more.
            channel.publisher.deliver(channel.queue(name), producer, cast(Sequence[Outgoing], messages))
        except _PASSING as error:
            self.close()
            raise Unreachable(f"{type(error).__name__}: {error}") from error
        except redis.ResponseError as error:
            if str(error).startswith("DQINVALID"):
                raise Refused(str(error)) from error
            if _FULL in str(error):
                raise Unreachable(str(error)) from error
            raise
        except InvalidMessage as error:
            raise Refused(str(error)) from error

    def _open(self) -> Any:
        if self._connection is None:
            connection = punctual_connection(self._app, self._step_s)
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
            queue = self._queue(name)
            if queue is not None:
                queue(channel).declare()
            self._declared.add(name)

    def close(self) -> None:
        """See the protocol."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.collect(socket_timeout=1)
        self._kombu.close()


def _any_transient(declare: Any) -> bool:
    return any(
        getattr(entity, "auto_delete", False) and not getattr(entity, "durable", True)
        for entity in declare or ()
    )
