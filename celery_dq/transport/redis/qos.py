"""What a channel has delivered, and how much more it may."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_dq.transport.prefetch import PrefetchCount
from celery_dq.transport.redis.message import Message

if TYPE_CHECKING:
    from celery_dq.transport.redis.channel import Channel


class QoS(PrefetchCount):
    """Prefetch count and acknowledgements of one channel.

    Acknowledgements may come from any thread and after the channel was closed:
    they go to the ledger of the process, and leave through whatever connection
    there is.
    """

    channel: Channel

    def forget(self, delivery_tag: str) -> None:
        """Stop counting a message; the ledger has its own word on it."""
        self._delivered.pop(delivery_tag, None)

    def settle(self, delivery_tag: str) -> None:
        """The message is acknowledged and its task is about to run."""
        self._delivered.pop(delivery_tag, None)
        self.channel.ledger.settle(delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        """The message is done with: finish it."""
        self._delivered.pop(delivery_tag, None)
        self.channel.ledger.finish(delivery_tag)
        self.channel.tell_now()

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Give the message back to its place, or refuse it for good."""
        message = self._delivered.get(delivery_tag)
        if isinstance(message, Message):
            self.refuse(message, requeue)
        elif message is not None:
            self.forget(delivery_tag)
            if requeue:
                self.channel.requeue_transient(message)
        elif requeue:
            # Its channel was closed while it ran.
            self.channel.ledger.release(delivery_tag, "requeue")
        else:
            self.channel.ledger.finish(delivery_tag)
        self.channel.tell_now()

    def refuse(self, message: Message, requeue: bool) -> None:
        """Like :meth:`reject`, but only the ledger hears of it; callable from any thread."""
        tag = message.delivery_tag
        self.forget(tag)
        if requeue:
            self.channel.ledger.release(tag, "crashed" if message.crashed else "requeue")
        elif message.burial or self.channel.session.options.dead_letter_failures:
            self.channel.bury(message, message.burial or "rejected")
        else:
            self.channel.ledger.finish(tag)

    def restore_unacked(self) -> list[tuple[BaseException, Any]]:
        """Give back everything delivered and not acknowledged, except what runs."""
        running = self.channel.running_tags()
        for tag in list(self._delivered):
            message = self._delivered.pop(tag, None)
            if message is None or tag in running:
                continue
            if isinstance(message, Message):
                self.channel.ledger.release(tag, "requeue" if message.started else "unstarted")
            else:
                self.channel.requeue_transient(message)
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """Like :meth:`restore_unacked`, at channel close or interpreter exit, once."""
        self._on_collect.cancel()
        if self._delivered.restored:
            return
        self._delivered.restored = True
        if self.restore_at_shutdown and self.channel.do_restore:
            self.restore_unacked()
