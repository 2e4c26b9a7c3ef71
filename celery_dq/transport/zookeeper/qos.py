"""What a channel has delivered, and how much more it may."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from celery_dq.transport.prefetch import PrefetchCount
from celery_dq.transport.zookeeper.hand import Verb

if TYPE_CHECKING:
    from celery_dq.transport.zookeeper.channel import Channel


class QoS(PrefetchCount):
    """Prefetch count and acknowledgements of one channel.

    Acknowledgements may come from any thread: they go to the hand, and the fetcher tells the broker.
    """

    channel: Channel

    def __init__(self, channel: Any, prefetch_count: int = 0) -> None:
        super().__init__(channel, prefetch_count)
        self._pid = os.getpid()

    def ack(self, delivery_tag: str) -> None:
        """The message is done with."""
        self._say(Verb.ACK, delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Give the message back to its place, or drop it for good."""
        message = self._delivered.get(delivery_tag)
        back = Verb.CRASHED if getattr(message, "crashed", False) else Verb.REQUEUE
        self._say(back if requeue else Verb.ACK, delivery_tag)

    def _say(self, verb: Verb, delivery_tag: str) -> None:
        self._delivered.pop(delivery_tag, None)
        self.channel.hand.say(verb, delivery_tag)

    def restore_unacked(self) -> list[tuple[BaseException, Any]]:
        """Give back everything delivered and not acknowledged."""
        for tag in list(self._delivered):
            self._say(Verb.REQUEUE, tag)
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """Like :meth:`restore_unacked`, at channel close or interpreter exit, once."""
        self._on_collect.cancel()
        if self._delivered.restored or self._pid != os.getpid():
            # A child has inherited this: what is held is the parent's.
            return
        self._delivered.restored = True
        if self.restore_at_shutdown and self.channel.do_restore:
            self.restore_unacked()
