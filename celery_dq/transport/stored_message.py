"""A message as it comes out of a broker of ours."""

from __future__ import annotations

from typing import Any

from celery_dq.hooks import DELIVERIES
from celery_dq.transport import envelope as envelopes
from celery_dq.transport.bases import KombuMessage

__all__ = ["StoredMessage"]


class StoredMessage(KombuMessage):
    """What a consumer receives, made of an envelope and a body.

    Arguments:
        envelope: packed headers and properties.
        body: as it was published.
        priority: it may have changed since.
        due: it had to wait for its time.
        returned: it was delivered before.
        deliveries: how many workers were lost with it so far.
        tag: delivery tag.
        queue: name of the queue it was taken from.
        channel: that delivers it.
    """

    def __init__(
        self,
        envelope: bytes,
        body: str | bytes,
        *,
        priority: int,
        due: bool,
        returned: bool,
        deliveries: int,
        tag: str,
        queue: str,
        channel: Any,
    ) -> None:
        headers, properties, content_type, content_encoding = envelopes.unpack(envelope)
        # What a retry has inherited, or somebody has forged: it is written anew at every delivery.
        headers.pop(DELIVERIES, None)
        if due:
            # It is due: with the header still there, the worker would put it into its timer.
            headers["eta"] = None
        info = properties.setdefault("delivery_info", {})
        info.setdefault("exchange", "")
        info.setdefault("routing_key", queue)
        if returned:
            info["redelivered"] = headers["redelivered"] = True
            info["deliveries"] = headers[DELIVERIES] = deliveries
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
