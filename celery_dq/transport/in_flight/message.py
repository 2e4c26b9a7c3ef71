"""The message that a consumer receives, and the prefetch count and acks of its channel.

A :class:`Message` ends by way of its channel's :class:`QoS`, which takes it out of the prefetch count and
records its ack in the ``InFlightMessages`` of the process.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from kombu.utils import json as kombu_json

from celery_dq.compat.kombu_messages import json_decoder_is_kombus
from celery_dq.errors import CorruptRecord
from celery_dq.protocols import DEDUP_HEADER, QUEUE_HEADER, RESOURCE_HEADER, TOKEN_HEADER, TermPermit
from celery_dq.shown import shown_logger
from celery_dq.transport.bases import VirtualQoS
from celery_dq.transport.in_flight.in_flight_messages import InFlightMessages
from celery_dq.transport.message_record import DedupSection, MessageRecord
from celery_dq.transport.stored_message import StoredMessage

if TYPE_CHECKING:
    from celery_dq.transport.in_flight.pending_acks import InFlightMessage
    from celery_dq.transport.partition_replies import ClaimedEntry

logger = shown_logger(__name__)

JSON = "application/json"
#: Seconds between two checks of the confirmation that a message waits for.
CONFIRMATION_LOOK_S = 0.001

_read_json: Callable[[str], Any] = json.JSONDecoder(object_hook=kombu_json.object_hook).decode


class Message(StoredMessage):
    """A message claimed from a partition.

    Attributes:
        record: The stored message as it was claimed.
        prefix: Prefix of the keys of its partition; ``""`` for a message that was got without a consumer.
        deliveries: Number of workers that have died with the message so far.
        discard: Reason why the message must not run (``expired``, ``cancelled``, ``dead:…``), or ``""``.
        started: Whether the task has begun. Before that, the message can be released without an effect.
        settles: Whether the message was settled before its task runs, so that :meth:`ack` does not finish it.
        dead_letter_reason: Reason with which the message became a dead letter, or will if it is rejected;
            ``""`` for none.
        crashed: Whether a requeue counts as a delivery, because a worker was lost.
        token: Fencing token of the term in which the message was claimed from a singleton queue; 0 for other
            queues.
        claimed_at: Monotonic time at which the message came into the inbox.
        permit: The term with this token; None for other queues.
    """

    def __init__(
        self, record: MessageRecord, entry: ClaimedEntry, tag: str, queue: str, channel: Any
    ) -> None:
        super().__init__(
            record.envelope,
            record.body,
            priority=record.priority,
            due_us=record.due_us,
            returned=entry.returned,
            deliveries=entry.deliveries,
            tag=tag,
            queue=queue,
            channel=channel,
        )
        # A retry inherits these headers, and a publisher may have forged them, so each delivery sets them.
        self.headers.pop(TOKEN_HEADER, None)
        self.headers.pop(QUEUE_HEADER, None)
        self.headers.pop(DEDUP_HEADER, None)
        self.headers.pop(RESOURCE_HEADER, None)
        if entry.resource:
            self.headers[RESOURCE_HEADER] = entry.resource
        if record.dedup:
            # The fencing token of this run is larger than that of any earlier run.
            self.headers[TOKEN_HEADER] = int(entry.claim)
            self.headers[DEDUP_HEADER] = DedupSection.unpack(record.dedup).header()
        if record.tenant:
            self.properties["tenant"] = record.tenant
        self.record = record
        self.prefix = ""
        self.message_id = entry.id
        self.discard = entry.reason
        self.started = False
        self.settles = False
        self.crashed = False
        self.dead_letter_reason = ""
        self.token = 0
        self.claimed_at = 0.0
        self.permit: TermPermit | None = None

    def enter_term(self, token: int, permit: TermPermit) -> None:
        """Mark the message as claimed from a singleton queue, in the term with this token."""
        self.token = token
        self.permit = permit
        self.headers[TOKEN_HEADER] = token
        self.headers[QUEUE_HEADER] = self.queue

    def may_deliver(self) -> bool:
        """Return whether no other worker can have the message: its lease and its term, if any, are fresh."""
        held = self.channel.in_flight.get(self.delivery_tag)
        return held is not None and self._is_fresh(held)

    def may_start(self) -> bool:
        """Return whether :meth:`may_deliver` holds and the predecessor on a singleton queue is over."""
        held = self.channel.in_flight.get(self.delivery_tag)
        return held is not None and held.unfinished_predecessor() is None and self._is_fresh(held)

    def predecessor(self) -> InFlightMessage | None:
        """Return the message on a singleton queue that must have ended before this one starts, if any."""
        held = self.channel.in_flight.get(self.delivery_tag)
        return None if held is None else held.unfinished_predecessor()

    def expect_return(self) -> None:
        """Note that a retry or replacement has this message's place: messages claimed after it must wait."""
        held = self.channel.in_flight.get(self.delivery_tag)
        if held is not None:
            held.will_return = True

    def wait_for_confirmation(self) -> None:
        """Block this thread or greenlet until the broker has confirmed a dead letter before the message."""
        while (before := self.predecessor()) and before.is_pending_dead_letter and self.may_deliver():
            time.sleep(CONFIRMATION_LOOK_S)

    def _is_fresh(self, held: InFlightMessage) -> bool:
        if not self.channel.in_flight.is_lease_trusted(held.partition):
            return False
        return self.permit is None or self.permit.is_firm

    def _decode(self) -> Any:
        # The result is that of kombu, which creates a decoder for each body.
        if (
            self.content_type == JSON
            and (self.accept is None or JSON in self.accept)
            and json_decoder_is_kombus()
            and isinstance(self.body, bytes)
        ):
            with contextlib.suppress(Exception):  # kombu has its own errors
                return _read_json(self.body.decode())
        return super()._decode()

    def ack(self, multiple: bool = False) -> None:
        """Finish the message, unless it is settled: then its task finishes it.

        Raises:
            MessageStateError: The message was acknowledged, rejected or requeued before.
        """
        if self.settles:
            if self.acknowledged:
                raise self.MessageStateError(f"Message already acknowledged with state: {self._state}")
            self._state = "ACK"
        else:
            super().ack(multiple=multiple)

    def settle(self, may_wait: bool = False) -> None:
        """Acknowledge the message before its task ends: it is never delivered again, and keeps its slot.

        Args:
            may_wait: the task runs in another process, so the ack may wait a moment for its end.
        """
        self.settles = True
        self.channel.qos.settle(self.delivery_tag, may_wait)

    def release(self, mode: str) -> None:
        """Release the message to its old place; for the modes see ``InFlightMessages.release``. Idempotent.

        Like :meth:`finish`, it may be called from any thread, and after the channel was closed.
        """
        self.channel.qos.release(self.delivery_tag, mode)

    def dead_letter(self, reason: str) -> None:
        """Move the message to the dead letters with *reason*; a later ack or reject has no effect."""
        self.dead_letter_reason = reason
        self.channel.qos.dead_letter(self, reason)

    def finish(self) -> None:
        """Finish the message after its task, with any outcome: its concurrency slot is free. Idempotent."""
        self.channel.qos.finish(self.delivery_tag)


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

    def requeue_transient(self, message: Any) -> None:
        """Push a message of a transient queue again."""


class QoS(VirtualQoS):
    """Prefetch count and acknowledgements of one channel.

    Acknowledgements may come from any thread, also after the channel was closed. They are recorded in the
    messages in flight, and sent over any connection of the process. Kombu's ``QoS`` would track them itself.
    """

    channel: SettlingChannel

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

    def counts(self, delivery_tag: str) -> bool:
        """Return whether a delivered message counts."""
        return delivery_tag in self._delivered

    def forget(self, delivery_tag: str) -> None:
        """Remove the message from the prefetch count only; the messages in flight track its ack."""
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

    def finish(self, delivery_tag: str) -> None:
        """Finish a message whose task is over, which frees its concurrency slot."""
        self._delivered.pop(delivery_tag, None)
        self.channel.in_flight.finish(delivery_tag)

    def dead_letter(self, message: Message, reason: str) -> None:
        """Move a message to the dead letters with a reason."""
        tag: str = message.delivery_tag
        self.channel.in_flight.dead_letter(tag, reason, message.record.pack())
        self.forget(tag)

    def dead_letter_unreadable(self, queue: str, entry: ClaimedEntry, tag: str, why: CorruptRecord) -> None:
        """Move a stored message that cannot be read to the dead letters."""
        logger.error(
            "Message %s of queue %s was moved to the dead letters: %s.",
            entry.id,
            queue,
            why,
            extra={"event": "unreadable_message_dead_lettered", "queue": queue},
        )
        self.channel.in_flight.dead_letter(tag, f"unreadable: {why}", entry.record)

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
        if not isinstance(message, Message):
            self.forget(delivery_tag)
            if message is not None and requeue:
                self.channel.requeue_transient(message)
        elif requeue:
            self.release(delivery_tag, "crashed" if message.crashed else "requeue")
        elif message.dead_letter_reason or self.channel.context.options.dead_letter_failures:
            message.dead_letter(message.dead_letter_reason or "rejected")
        else:
            self.forget(delivery_tag)
            self.channel.in_flight.finish(delivery_tag)
        self.channel.send_acks_now()

    def restore_unacked(self) -> list[tuple[BaseException, Any]]:
        """Return all unacknowledged messages to their queues, except those whose tasks run.

        Running messages stay here, so that a reject finds them after the channel was closed.
        """
        running = self.channel.running_tags()
        for tag in list(self._delivered):
            if tag in running:
                continue
            message = self._delivered.get(tag)
            if isinstance(message, Message):
                self.channel.in_flight.release(tag, "requeue" if message.started else "unstarted")
            elif message is not None:
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
