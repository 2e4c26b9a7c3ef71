"""What the flusher needs of a broker.

The one of celery-dq comes from outside (``celery_dq.app``), because transport and producer do not know each
other; the one for every broker of kombu is :mod:`celery_dq.producer.kombu_sender`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from celery_dq.errors import DQError
from celery_dq.producer.buffer import Message

__all__ = ["Addressed", "NotNow", "Refused", "Sender", "State", "Unreachable"]

#: What is known of a message that was not confirmed.
State: TypeAlias = Literal["not_sent", "possibly_sent", "rejected"]


class Unreachable(DQError):
    """The broker does not answer, or cannot take anything now. All lanes wait.

    :param sent: how many of the batch, from its start, it has confirmed before.
    """

    def __init__(self, message: str, sent: int = 0) -> None:
        super().__init__(message, sent)

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def sent(self) -> int:
        """How many messages, from the start of the batch, are delivered."""
        count: int = self.args[1]
        return count


class NotNow(Unreachable):
    """The broker answers, and does not take this lane's messages now. Only the lane waits."""


class Refused(DQError):
    """The broker will not take this batch, now or later. Nothing of it was stored."""


class Addressed(NamedTuple):
    """A message as it is put into the buffer.

    :param lane: names the destination; equal texts keep their order. Survives a restart.
    :param id: the task id.
    :param payload: what :meth:`Sender.send` gets back.
    """

    lane: str
    id: bytes
    payload: bytes


class Sender(Protocol):
    """Sends batches, from one thread."""

    def address(self, message: dict[str, Any], exchange: str, routing_key: str, declare: Any) -> Addressed:
        """Say where a message goes, and pack it. Called by the threads that publish; opens nothing.

        :param message: as kombu's ``prepare_message`` makes it for a virtual transport.

        Raises:
            InvalidMessage: It cannot be sent.
        """

    def send(self, lane: str, producer: str, messages: Sequence[Message]) -> None:
        """Send a batch and wait until the broker has it.

        :param producer: who numbers the messages; with the numbers it tells a resent one.

        Raises:
            NotNow: Try again later, with this lane.
            Unreachable: Try again later, with all lanes.
            Refused: The whole batch is refused, and nothing of it stored.
            Exception: Try again later, with this lane.
        """

    def close(self) -> None:
        """Let go of the connection; the next `send` makes a new one. Does not raise."""
