"""The prefetch count of a channel and the acknowledgements of its messages."""

from __future__ import annotations

from typing import Any, Protocol

from celery_dq.transport.bases import VirtualQoS
from celery_dq.transport.in_flight.in_flight_messages import InFlightMessages
from celery_dq.transport.in_flight.message import Message


class SettlingChannel(Protocol):
    """The channel whose deliveries a kombu ``QoS`` counts and acknowledges."""

    @property
    def in_flight(self) -> InFlightMessages:
        """The messages that the process holds."""

    @property
    def context(self) -> Any:
        """The state shared by all channels of the connection."""

    @property
    def do_restore(self) -> bool:
        """Whether kombu gives messages back when the channel ends."""

    def running_tags(self) -> Any:
        """Return the delivery tags of messages that run."""

    def send_acks_now(self) -> None:
        """Send the pending acks at once where no message is delivered next."""

    def send_acks_at_shutdown(self) -> None:
        """Let another thread send the pending acks, if no loop will; callable from any thread."""

    def requeue_transient(self, message: Any) -> None:
        """Push a message of a transient queue again."""


class PrefetchCount(VirtualQoS):
    """The prefetch count of one channel, and the messages that count against it.

    Unlike kombu's ``QoS``, this class does not track acknowledgements, which may come from any thread.
    """

    def can_consume(self) -> bool:
        """Return whether the prefetch count allows one more message."""
        limit = self.prefetch_count
        return not limit or len(self._delivered) < limit

    def can_consume_max_estimate(self) -> int | None:
        """Return how many more messages the prefetch count allows; None without a limit."""
        limit: int = self.prefetch_count
        return max(limit - len(self._delivered), 0) if limit else None

    def append(self, message: Any, delivery_tag: str) -> None:
        """Count a delivered message."""
        self._delivered[delivery_tag] = message


class QoS(PrefetchCount):
    """Prefetch count and acknowledgements of one channel.

    Acknowledgements may come from any thread, also after the channel was closed. They are recorded in the
    ``InFlightMessages`` of the process, and sent over any of its connections.
    """

    channel: SettlingChannel

    def forget(self, delivery_tag: str) -> None:
        """Remove the message from the prefetch count only; ``InFlightMessages`` tracks its ack."""
        self._delivered.pop(delivery_tag, None)

    def release(self, delivery_tag: str, mode: str) -> None:
        """Release a message to its place; the modes are those of ``InFlightMessages.release``."""
        # Released before it makes room: a fetcher's thread must not claim a later message in between.
        self.channel.in_flight.release(delivery_tag, mode)
        self.forget(delivery_tag)

    def settle(self, delivery_tag: str, may_wait: bool = False) -> None:
        """Settle a message whose task begins; for *may_wait* see ``InFlightMessages.settle``."""
        self._delivered.pop(delivery_tag, None)
        self.channel.in_flight.settle(delivery_tag, may_wait)
        self.channel.send_acks_at_shutdown()

    def finish(self, delivery_tag: str) -> None:
        """Finish a message whose task is over, which frees its concurrency slot."""
        self._delivered.pop(delivery_tag, None)
        self.channel.in_flight.finish(delivery_tag)
        self.channel.send_acks_at_shutdown()

    def dead_letter(self, message: Message, reason: str) -> None:
        """Move a message to the dead letters with a reason."""
        tag: str = message.delivery_tag
        self.channel.in_flight.dead_letter(tag, reason, message.record.pack())
        self.forget(tag)

    def ack(self, delivery_tag: str) -> None:
        """Finish a message that a consumer acknowledges."""
        self._delivered.pop(delivery_tag, None)
        self.channel.in_flight.finish(delivery_tag)
        self.channel.send_acks_now()

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Reject the message.

        Args:
            delivery_tag: Delivery tag of the message.
            requeue: Whether the message returns to its place in the queue. Otherwise it ends here.
        """
        message = self._delivered.get(delivery_tag)
        if isinstance(message, Message):
            self.reject_message(message, requeue)
        elif message is not None:
            self.forget(delivery_tag)
            if requeue:
                self.channel.requeue_transient(message)
        elif requeue:
            # The message is no longer counted, because its channel was closed while it ran.
            self.channel.in_flight.release(delivery_tag, "requeue")
        else:
            self.channel.in_flight.finish(delivery_tag)
        self.channel.send_acks_now()

    def reject_message(self, message: Message, requeue: bool) -> None:
        """Reject *message* without sending the ack at once; callable from any thread."""
        tag = message.delivery_tag
        if requeue:
            self.release(tag, "crashed" if message.crashed else "requeue")
        elif message.dead_letter_reason or self.channel.context.options.dead_letter_failures:
            message.dead_letter(message.dead_letter_reason or "rejected")
        else:
            self.forget(tag)
            self.channel.in_flight.finish(tag)

    def restore_unacked(self) -> list[tuple[BaseException, Any]]:
        """Return all unacknowledged messages to their queues, except those whose tasks run."""
        running = self.channel.running_tags()
        for tag in list(self._delivered):
            message = self._delivered.get(tag)
            if message is not None and tag not in running:
                if isinstance(message, Message):
                    self.channel.in_flight.release(tag, "requeue" if message.started else "unstarted")
                else:
                    self.channel.requeue_transient(message)
            self.forget(tag)
        return []

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """Call :meth:`restore_unacked` once, at channel close or interpreter exit."""
        self._on_collect.cancel()
        if self._delivered.restored:
            return
        self._delivered.restored = True
        if self.restore_at_shutdown and self.channel.do_restore:
            self.restore_unacked()
