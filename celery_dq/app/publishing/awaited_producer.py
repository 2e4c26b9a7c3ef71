"""The producer of an awaited call, which keeps the messages of the call until a coroutine sends them.

Celery and the stages of a call are plain functions, and cannot await. They make the message of an awaited
call with this producer, as that of a buffered call. Then :mod:`celery_dq.app.publishing.awaited_calls` sends
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery_dq.app.publishing.pipeline import Call
from celery_dq.app.senders import lane_of
from celery_dq.producer.buffering_producer import NOWHERE, BufferingProducer, message_of
from celery_dq.producer.sender import Addressed
from celery_dq.transport.packer import PackedMessage, Packer


@dataclass(slots=True, eq=False)
class AwaitedMessage:
    """One message of an awaited call.

    Attributes:
        packed: The message for a partition; None when kombu has to publish it.
        prepared: The arguments of kombu's ``Producer._publish``; empty for a message from a template.
    """

    packed: PackedMessage | None
    prepared: tuple[Any, ...] = ()


class AwaitedProducer(BufferingProducer):
    """The producer of one awaited call.

    Args:
        attributes: Those of a :func:`template_of_producers`, because kombu makes a producer slowly.

    Attributes:
        call: The call, when it has come to the stages; None for a task that ran in the caller's process, and
            for a plain call.
        messages: What the call has published.
        buffered: Its messages for the buffer, in the place of `messages` when the call is buffered.
        limits: The :class:`~celery_dq.app.publishing.direct_stage.CallLimits` of a call that is not buffered,
            once it was admitted; None before.
    """

    _packer: Packer

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)
        self._address: Callable[..., Addressed] | None = None
        self.call: Call | None = None
        self.messages: list[AwaitedMessage] = []
        self.buffered: list[Addressed] = []
        self.limits: Any = None

    def buffer_by(self, address: Callable[..., Addressed]) -> None:
        """Keep the messages for the buffer.

        Args:
            address: Makes them, see :meth:`celery_dq.producer.sender.Sender.address`.
        """
        self._address = address

    @property
    def is_direct(self) -> bool:
        """Whether the call is not buffered."""
        return self._address is None

    @property
    def connection(self) -> Any:
        """The connection, which has the scheme of a broker as long as the call awaits its answer."""
        return self._nowhere if self._address is None else NOWHERE

    def take(self, lane: str, message: PackedMessage) -> None:
        """Keep a message that was made from a template."""
        if self._address is None:
            self.messages.append(AwaitedMessage(message))
        else:
            self.buffered.append(Addressed(lane, message.id.encode(), message.record))

    def _publish(self, *prepared: Any) -> None:
        message, exchange, routing_key, declare = message_of(*prepared)
        if self._address is not None:
            self.buffered.append(self._address(message, exchange, routing_key, declare))
            return
        packed = None
        # A queue that has to be declared is left to kombu.
        if not declare and lane_of(exchange, routing_key, 0, declare):
            message["properties"]["delivery_info"].update(exchange=exchange, routing_key=routing_key)
            packed = self._packer.pack(message, routing_key)
        self.messages.append(AwaitedMessage(packed, prepared))


def template_of_producers(packer: Packer, scheme: str) -> dict[str, Any]:
    """Return the attributes that the producers of an app share.

    Args:
        packer: Packs the messages.
        scheme: The scheme of the broker.
    """
    made = BufferingProducer(_refuse, _refuse, "redis")
    made.connection.transport_cls = scheme
    return {**vars(made), "_packer": packer}


def _refuse(*message: Any) -> Any:
    raise AssertionError("an awaited producer keeps its messages by itself")
