"""The message that a consumer receives."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kombu import serialization
from kombu.utils import json as kombu_json

from celery_dq.hooks import QUEUE, TOKEN, Permit
from celery_dq.transport.redis.record import Record
from celery_dq.transport.stored_message import StoredMessage

if TYPE_CHECKING:
    from celery_dq.transport.redis.ledger import Held
    from celery_dq.transport.redis.replies import ClaimedEntry

JSON = "application/json"

_read_json: Callable[[str], Any] = json.JSONDecoder(object_hook=kombu_json.object_hook).decode


class Message(StoredMessage):
    """A message claimed from a partition.

    Attributes:
        record: the stored message as it was claimed.
        deliveries: how many workers have died with it so far.
        discard: why it must not run (``expired``, ``cancelled``, ``dead:…``), or ``""``.
        started: its task has begun; before that it can be given back unharmed.
        settles: :meth:`ack` comes before the task runs, so it settles and does not finish.
        burial: when it is rejected, it becomes a dead letter with this reason.
        crashed: a requeue counts as a delivery, because a worker was lost.
        token: of the term in which it was claimed from a led queue; 0 for other queues.
        permit: that term.
    """

    def __init__(self, record: Record, entry: ClaimedEntry, tag: str, queue: str, channel: Any) -> None:
        super().__init__(
            record.envelope,
            record.body,
            priority=record.priority,
            due=bool(record.due_us),
            returned=entry.returned,
            deliveries=entry.deliveries,
            tag=tag,
            queue=queue,
            channel=channel,
        )
        # What a retry has inherited, or somebody has forged: they are written anew at every delivery.
        self.headers.pop(TOKEN, None)
        self.headers.pop(QUEUE, None)
        if record.dedup:
            # Fencing token of the run: larger than that of any run before it.
            self.headers[TOKEN] = int(entry.claim)
        if record.tenant:
            self.properties["tenant"] = record.tenant
        self.record = record
        self.message_id = entry.id
        self.discard = entry.reason
        self.started = False
        self.settles = False
        self.crashed = False
        self.burial = ""
        self.token = 0
        self.permit: Permit | None = None

    def lead(self, token: int, permit: Permit) -> None:
        """It comes from a led queue, in the term with this token."""
        self.token = token
        self.permit = permit
        self.headers[TOKEN] = token
        self.headers[QUEUE] = self.queue

    def may_go(self) -> bool:
        """Return whether nobody else can have it: its lease is fresh, and its term if it has one."""
        held = self.channel.ledger.get(self.delivery_tag)
        return held is not None and self._is_fresh(held)

    def may_start(self) -> bool:
        """Return whether :meth:`may_go`, and what goes before it on a led queue is over for good."""
        held = self.channel.ledger.get(self.delivery_tag)
        return held is not None and held.waits_for() is None and self._is_fresh(held)

    def _is_fresh(self, held: Held) -> bool:
        if not self.channel.ledger.trusted(held.partition):
            return False
        return self.permit is None or self.permit.firm

    def _decode(self) -> Any:
        # Kombu's way to the same result makes a decoder for each body.
        if (
            self.content_type == JSON
            and (self.accept is None or JSON in self.accept)
            and _json_is_kombus()
            and isinstance(self.body, bytes)
        ):
            with contextlib.suppress(Exception):  # kombu has its own errors
                return _read_json(self.body.decode())
        return super()._decode()

    def ack(self, multiple: bool = False) -> None:
        """Acknowledge: settle before the task runs, finish after it or where no task is.

        Raises:
            MessageStateError: it was acknowledged, rejected or requeued before.
        """
        if self.settles:
            if self.acknowledged:
                raise self.MessageStateError(f"Message already acknowledged with state: {self._state}")
            self.channel.basic_settle(self.delivery_tag)
            self._state = "ACK"
        else:
            super().ack(multiple=multiple)

    def bury(self, reason: str) -> None:
        """Keep it as a dead letter, with *reason*, whatever else is said of it later."""
        self.channel.bury(self, reason)

    def finish(self) -> None:
        """The task is over, whatever its outcome: free its slot. Doing so twice is harmless."""
        self.channel.basic_finish(self.delivery_tag)


def _json_is_kombus() -> bool:
    """Whether JSON is still decoded by what kombu registers, and not forbidden."""
    registry: Any = serialization.registry  # type: ignore[attr-defined]  # not in its stubs
    return registry._decoders.get(JSON) is kombu_json.loads and JSON not in registry._disabled_content_types
