"""The spans of celery-dq, by the semantic conventions for messaging (1.27 and later).

The context of a call is in the headers of its message, as the propagator of the application wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import Link, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from celery_dq.producer.buffer import BufferedMessage
from celery_dq.producer.sender import Addressed, Refusal, Sender
from celery_dq.shown import shown_logger

logger = shown_logger(__name__)

#: Links of one span, as many as an SDK keeps by default.
MOST_LINKS = 128
_SYSTEM = "celery"


def _tracer() -> trace.Tracer:
    # The provider of the application may be set after this module was imported.
    return trace.get_tracer("celery_dq")


def provider_is_set() -> bool:
    """Return whether this process has a tracer provider. Without one, the API discards all spans."""
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def _attributes(operation: str, kind: str, destination: str, **more: AttributeValue) -> dict[str, Any]:
    return {
        "messaging.system": _SYSTEM,
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
        "messaging.destination.name": destination,
        **more,
    }


def _context_of(headers: Mapping[str, Any]) -> Context:
    """Return the context of the call that made a message; an empty one if it has none."""
    return propagate.extract(headers, context=Context())


@contextmanager
def _guarded() -> Iterator[None]:
    """Report an error of the tracer: messages are sent and delivered without their spans then."""
    try:
        yield
    except Exception as exc:
        logger.warning(
            "A span was not recorded, because the tracer of this app failed: %r.",
            exc,
            extra={"event": "span_not_recorded"},
        )


@contextmanager
def batch_span(destination: str, count: int, headers: Iterable[Mapping[str, Any]]) -> Iterator[None]:
    """Make a span of the block, in which a batch is sent.

    Args:
        destination: Name of the queue.
        count: Number of messages.
        headers: Headers of messages to link, at most :data:`MOST_LINKS`.
    """
    span: trace.Span = trace.INVALID_SPAN
    token = None
    with _guarded():
        contexts = (trace.get_current_span(_context_of(each)).get_span_context() for each in headers)
        links = [Link(context) for context in contexts if context.is_valid]
        attributes = _attributes("send", "send", destination, **{"messaging.batch.message_count": count})
        span = _tracer().start_span(f"send {destination}", Context(), SpanKind.CLIENT, attributes, links)
        token = attach(trace.set_span_in_context(span))
    try:
        yield
    except BaseException as exc:
        with _guarded():
            span.record_exception(exc)
            span.set_status(Status(StatusCode.ERROR, f"{type(exc).__name__}: {exc}"))
            span.set_attribute("error.type", type(exc).__qualname__)
        raise
    finally:
        if token is not None:
            detach(token)
        with _guarded():
            span.end()


def message_span(
    operation: str,
    kind: str,
    destination: str,
    headers: Mapping[str, Any],
    *,
    seconds: float = 0.0,
    end_ns: int,
    error: str = "",
    **attributes: AttributeValue,
) -> None:
    """Record a span that is over, in the trace of the call that made the message.

    Args:
        operation: Name of the operation.
        kind: Its type, ``receive`` or ``settle``.
        destination: Name of the queue.
        headers: Headers of the message.
        seconds: Length of the span.
        end_ns: Its end, in ns since 1970.
        error: Why the task will not run, or not again; "" for a span without an error.
        attributes: More attributes.
    """
    task_id = headers.get("id")
    if isinstance(task_id, str):
        attributes["messaging.message.id"] = task_id
    with _guarded():
        span = _tracer().start_span(
            f"{operation} {destination}",
            _context_of(headers),
            SpanKind.CLIENT,
            _attributes(operation, kind, destination, **attributes),
            start_time=end_ns - int(seconds * 1e9),
        )
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(end_ns)


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

    def send(self, lane: str, producer: str, messages: Sequence[BufferedMessage]) -> Sequence[Refusal]:
        """See :meth:`celery_dq.producer.sender.Sender.send`."""
        # A lane for a partition has no exchange: p<priority>/<queue>, else k<priority>/<exchange>/<key>.
        parts = lane.split("/", 1 if lane.startswith("p") else 2)
        with batch_span(parts[-1] or parts[1], len(messages), self._headers(lane, messages)):
            return self._sender.send(lane, producer, messages)

    def _headers(self, lane: str, messages: Sequence[BufferedMessage]) -> Iterator[Mapping[str, Any]]:
        for message in islice(messages, MOST_LINKS):
            try:
                yield self._headers_of(lane, message.payload)
            except Exception:  # noqa: PERF203, S112 - the sender reports what it cannot read
                continue

    def close(self) -> None:
        """See :meth:`celery_dq.producer.sender.Sender.close`."""
        self._sender.close()
