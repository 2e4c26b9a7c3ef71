"""Publisher confirms of AMQP for a batch: publish all messages, then wait until the broker has them.

py-amqp waits for each message, which limits its rate to that of the broker's disk. Here one wait serves a
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_dq.compat.kombu_publishing import publish_without_waiting
from celery_dq.errors import DQError

__all__ = ["Confirms", "Nacked"]


class Nacked(DQError):
    """The broker does not accept a message, for example for a full queue with ``reject-publish``."""


class Confirms:
    """The confirms of one channel, on which no other code publishes.

    Args:
        channel: A fresh channel of py-amqp. From now on its ``basic_publish`` does not wait.
    """

    def __init__(self, channel: Any) -> None:
        channel.confirm_select()
        publish_without_waiting(channel)
        channel.events["basic_ack"].add(self._acked)
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

    def _acked(self, tag: int, multiple: bool) -> None:
        self._settle(tag, multiple)

    def _nacked(self, tag: int, multiple: bool) -> None:
        self._refused |= self._settle(tag, multiple)

    def _settle(self, tag: int, multiple: bool) -> set[int]:
        settled = {each for each in self._outstanding if each == tag or (multiple and each < tag)}
        self._outstanding -= settled
        return settled
