"""The message that a broker of this package delivers."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any

from celery_dq.protocols import DELIVERIES_HEADER
from celery_dq.transport import envelope as envelopes
from celery_dq.transport.bases import KombuMessage

__all__ = ["StoredMessage", "shown_eta"]


class StoredMessage(KombuMessage):
    """A message made of an envelope and a body.

    Args:
        envelope: Packed headers and properties.
        body: Body as published.
        priority: Present priority, which may differ from the published one.
        due_us: When the message was due, in µs since 1970; 0 when it had not to wait.
        returned: Whether the message was delivered before.
        deliveries: Number of workers that were lost with the message so far.
        tag: Delivery tag.
        queue: Name of the queue that the message was taken from.
        channel: Channel that delivers the message.

    Raises:
        CorruptRecord: The envelope cannot be read.
    """

    def __init__(
        self,
        envelope: bytes,
        body: str | bytes,
        *,
        priority: int,
        due_us: int,
        returned: bool,
        deliveries: int,
        tag: str,
        queue: str,
        channel: Any,
    ) -> None:
        headers, properties, content_type, content_encoding = envelopes.unpack(envelope)
        # A retry inherits this header, and a publisher may have forged it, so each delivery sets it.
        headers.pop(DELIVERIES_HEADER, None)
        #: The ETA of a message that waited for it. The header is removed, because the worker would put the
        #: task into its own timer; :meth:`pass_eta_to` restores it for the task.
        self.eta = shown_eta(headers.get("eta"), due_us) if due_us else None
        if due_us:
            headers["eta"] = None
        info = properties.setdefault("delivery_info", {})
        info.setdefault("exchange", "")
        info.setdefault("routing_key", queue)
        if returned:
            info["redelivered"] = headers["redelivered"] = True
            info["deliveries"] = headers[DELIVERIES_HEADER] = deliveries
        properties["priority"] = priority
        properties["delivery_tag"] = tag
        super().__init__(
            body=body,
            delivery_tag=tag,
            content_type=content_type,
            content_encoding=content_encoding,
            delivery_info=info,
            properties=properties,
            headers=headers,
            postencode="utf-8",
            channel=channel,
        )
        self.queue = queue
        self.deliveries = deliveries

    def dead_letter(self, reason: str) -> None:
        """Move the message to the dead letters with *reason*; a later ack or reject has no effect."""
        raise NotImplementedError

    def pass_eta_to(self, request: Any) -> None:
        """Show the task its ETA in ``self.request``; called when the request goes to the pool."""
        if self.eta is not None:
            request.request_dict["eta"] = self.eta


def shown_eta(published: Any, due_us: int) -> Any:
    """Return the ETA as published, or the due time when that is another one, as after a reschedule."""
    due = datetime.fromtimestamp(due_us / 1e6, timezone.utc)
    with suppress(Exception):  # the header may be anything
        moment = published
        if isinstance(moment, str):
            # Python 3.10 does not read the Z of UTC.
            moment = datetime.fromisoformat(moment[:-1] + "+00:00" if moment.endswith("Z") else moment)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=timezone.utc)
        # ZooKeeper has due times in whole milliseconds.
        if abs(moment - due) <= timedelta(milliseconds=1):
            return published
    return due.isoformat()
