"""The interface of a sender, which the flusher uses to reach a broker, and the errors of the producer.

:mod:`celery_dq.app` provides the sender for the brokers of celery-dq, because transport and producer do not
import each other. :mod:`celery_dq.producer.kombu_sender` is the sender for all other brokers of kombu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from kombu.exceptions import OperationalError

from celery_dq.errors import DQError
from celery_dq.producer.buffer import BufferedMessage

#: The state of a message that was not confirmed.
State: TypeAlias = Literal["not_sent", "possibly_sent", "rejected"]


class BrokerUnreachable(DQError):
    """The broker does not answer, or accepts no messages now. All lanes wait.

    Args:
        message: Text of the error.
        sent: How many messages, from the start of the batch, the broker has confirmed.
    """

    def __init__(self, message: str, sent: int = 0) -> None:
        super().__init__(message, sent)

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def sent(self) -> int:
        """Count of delivered messages, from the start of the batch."""
        count: int = self.args[1]
        return count


class PublishDeferred(BrokerUnreachable):
    """The broker, or a part of it, does not accept the messages of this lane now. Only this lane waits."""


class PublishInterrupted(BrokerUnreachable):
    """The broker answered on a new connection, which was closed at this batch. Only this lane waits."""


class PublishRefused(DQError):
    """The broker will never accept this batch. No message of it was stored."""


class Refusal(NamedTuple):
    """A message of a batch that the broker has refused, while it has the other ones.

    Attributes:
        place: Its place in the batch.
        error: The error.
        waits: Whether to send the message again, and those behind it, which the broker recognises.
    """

    place: int
    error: DQError
    waits: bool = False


class Addressed(NamedTuple):
    """A message for the buffer.

    Attributes:
        lane: Name of the destination. Messages with equal names keep their order. Valid after a restart.
        id: The task id.
        payload: Packed message, which :meth:`Sender.send` unpacks.
    """

    lane: str
    id: bytes
    payload: bytes


class Sender(Protocol):
    """Sends batches, from one thread."""

    def address(self, message: dict[str, Any], exchange: str, routing_key: str, declare: Any) -> Addressed:
        """Choose the lane of a message, and pack it. Called by publishing threads; opens no connection.

        Args:
            message: The message, as kombu's ``prepare_message`` makes it for a virtual transport.
            exchange: Name of the exchange.
            routing_key: Routing key.
            declare: Entities to declare before the message is published; may be None.

        Raises:
            InvalidMessage: The message cannot be sent.
        """

    def send(self, lane: str, producer: str, messages: Sequence[BufferedMessage]) -> Sequence[Refusal]:
        """Send a batch and wait until the broker has it.

        Args:
            lane: Name of the destination.
            producer: Producer sequence that numbers the messages. Broker and sequence recognise a resent
                message.
            messages: The batch, in order.

        Returns:
            The messages that were refused, in order; the broker has all others.

        Raises:
            PublishDeferred: The batch must be sent again later; other lanes are not affected.
            PublishInterrupted: The same; the batch itself may be the reason.
            BrokerUnreachable: The batch must be sent again later; all lanes wait.
            PublishRefused: The batch will never be accepted, and no message of it was stored.
            Exception: Any other error is handled as `PublishDeferred`.
        """

    def close(self) -> None:
        """Close the connection; the next `send` opens a new one. Does not raise."""


class BrokerUnavailable(DQError, OperationalError):
    """A call that is not buffered was not sent, or its outcome is unknown.

    The broker did not answer within ``dq_publish_timeout``. Or the call was not tried, because no connection
    of the pool was free in time, or because the circuit breaker is open after failures of other calls.
    """


class BufferFull(DQError, OperationalError):
    """Memory and disk had no room for a message within ``dq_buffer_max_block``; it was not accepted."""


class NotOnDisk(DQError, OperationalError):
    """As many messages as ``dq_buffer_sync_every`` could not be written to disk. They may be sent."""
