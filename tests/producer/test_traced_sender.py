"""The sender that makes spans of batches."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dq.producer.buffer import BufferedMessage
from celery_dq.tracing.sender import TracedSender
from celery_dq.tracing.spans import MOST_LINKS


class FailingSender:
    def __init__(self) -> None:
        self.sent = 0

    def address(self, *args: Any) -> Any: ...

    def send(self, lane: str, producer: str, messages: Any) -> None:
        self.sent += 1
        raise ConnectionError("away")

    def close(self) -> None: ...


def test_headers_that_cannot_be_read_do_not_keep_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def headers_of(lane: str, payload: bytes) -> Any:
        asked.append(payload)
        raise ValueError("no header")

    sender = FailingSender()
    message = BufferedMessage(1, b"id", b"payload")
    with pytest.raises(ConnectionError, match="away"):
        TracedSender(sender, headers_of).send("p0/shop", "x", [message] * (MOST_LINKS + 1))
    assert (sender.sent, len(asked)) == (1, MOST_LINKS)
