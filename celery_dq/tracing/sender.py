"""A sender that makes a span of each batch that the buffer hands over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from celery_dq.producer.buffer import BufferedMessage
from celery_dq.producer.sender import Addressed, Sender
from celery_dq.tracing.spans import MOST_LINKS, batch_span

__all__ = ["TracedSender"]


class TracedSender:
    """See :class:`celery_dq.producer.sender.Sender`.

    Args:
        sender: Sends the batches.
        headers_of: Returns the headers of a packed message of a lane.
    """

    def __init__(self, sender: Sender, headers_of: Callable[[str, bytes], Mapping[str, Any]]) -> None:
        self._sender = sender
        self._headers_of = headers_of

    def address(self, message: dict[str, Any], exchange: str, routing_key: str, declare: Any) -> Addressed:
        """See :meth:`celery_dq.producer.sender.Sender.address`."""
        return self._sender.address(message, exchange, routing_key, declare)

    def send(self, lane: str, producer: str, messages: Sequence[BufferedMessage]) -> None:
        """See :meth:`celery_dq.producer.sender.Sender.send`."""
        # A lane for a partition has no exchange: p<priority>/<queue>, else k<priority>/<exchange>/<key>.
        parts = lane.split("/", 1 if lane.startswith("p") else 2)
        with batch_span(parts[-1] or parts[1], len(messages), self._headers(lane, messages)):
            self._sender.send(lane, producer, messages)

    def _headers(self, lane: str, messages: Sequence[BufferedMessage]) -> Iterator[Mapping[str, Any]]:
        for each in islice(messages, MOST_LINKS):
            try:
                yield self._headers_of(lane, each.payload)
            except Exception:  # noqa: PERF203, S112 - the sender reports what it cannot read
                continue

    def close(self) -> None:
        """See :meth:`celery_dq.producer.sender.Sender.close`."""
        self._sender.close()
