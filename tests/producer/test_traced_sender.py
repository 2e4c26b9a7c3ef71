"""The sender that makes spans of batches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from celery_dq.producer.buffer import BufferedMessage
from celery_dq.producer.sender import Refusal
from celery_dq.tracing.spans import MOST_LINKS, TracedSender, message_span


class FailingSender:
    def __init__(self) -> None:
        self.sent = 0

    def address(self, *args: Any) -> Any: ...

    def send(self, lane: str, producer: str, messages: Any) -> Sequence[Refusal]:
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


class FaultyProcessor(SpanProcessor):
    """A processor that fails at the start or at the end of a span; the SDK lets its errors through."""

    def __init__(self, at: str) -> None:
        self.at, self.ended = at, 0

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if self.at == "start":
            raise ValueError("no start")

    def on_end(self, span: Any) -> None:
        self.ended += 1
        if self.at == "end":
            raise ValueError("no end")


@pytest.fixture(params=["start", "end"])
def faulty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FaultyProcessor:
    """A processor of all spans that raises."""
    processor, provider = FaultyProcessor(request.param), TracerProvider()
    provider.add_span_processor(processor)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return processor


@pytest.mark.parametrize("answers", [True, False])
def test_a_batch_is_sent_without_its_span_when_the_tracer_fails(
    faulty: FaultyProcessor, answers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Sender(FailingSender):
        def send(self, lane: str, producer: str, messages: Any) -> Sequence[Refusal]:
            self.sent += 1
            if not answers:
                raise ConnectionError("away")
            return ()

    sender = Sender()
    traced = TracedSender(sender, lambda lane, payload: {})
    with nullcontext() if answers else pytest.raises(ConnectionError, match="away"):
        traced.send("p0/shop", "x", [BufferedMessage(1, b"id", b"payload")])
    assert (sender.sent, faulty.ended) == (1, int(faulty.at == "end"))
    assert {vars(each)["event"] for each in caplog.records} == {"span_not_recorded"}
    assert "ValueError('no " in caplog.text


def test_a_message_is_delivered_without_its_span_when_the_tracer_fails(faulty: FaultyProcessor) -> None:
    message_span("receive", "receive", "shop", {"id": "1"}, end_ns=1)
    assert faulty.ended == int(faulty.at == "end")
