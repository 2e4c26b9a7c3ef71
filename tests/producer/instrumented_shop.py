"""Makes calls under a real monitoring tool, each in a trace of its own.

Run it as ``python -m tests.producer.instrumented_shop TOOL ORDER URL``, with the URL of a broker. With the
order ``first`` the tool is initialised before set-up, with ``last`` after the message templates were made.
The program prints, in JSON, a list of ``[task id, id of the caller's trace]``, the ids of the messages that
were packed from a template, and the number of spans that the tool has made for publishing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import sentry_sdk
from celery import Celery
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sentry_sdk.integrations.celery import CeleryIntegration

import celery_dq
from celery_dq.app.publishing.message_template import MessageTemplates


class Tool(Protocol):
    def begin(self) -> None: ...

    def trace(self, name: str) -> Any: ...

    def spans(self) -> int: ...


class Sentry:
    def __init__(self) -> None:
        self._published = 0

    def begin(self) -> None:
        def count(event: Any, hint: Any) -> None:
            self._published += sum(span["op"] == "queue.publish" for span in event["spans"])

        sentry_sdk.init(
            dsn="http://key@127.0.0.1:1/1",
            traces_sample_rate=1.0,
            default_integrations=False,
            integrations=[CeleryIntegration()],
            before_send_transaction=count,
        )

    @contextmanager
    def trace(self, name: str) -> Iterator[str]:
        with sentry_sdk.start_transaction(name=name) as transaction:
            yield transaction.trace_id

    def spans(self) -> int:
        return self._published


class OpenTelemetry:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider()
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def begin(self) -> None:
        instrumentor: Any = CeleryInstrumentor
        instrumentor().instrument(tracer_provider=self._provider)

    @contextmanager
    def trace(self, name: str) -> Iterator[str]:
        with self._provider.get_tracer(__name__).start_as_current_span(name) as span:
            yield f"{span.get_span_context().trace_id:032x}"

    def spans(self) -> int:
        return sum(span.kind is trace.SpanKind.PRODUCER for span in self._exporter.get_finished_spans())


TOOLS: dict[str, Callable[[], Tool]] = {"sentry": Sentry, "opentelemetry": OpenTelemetry}


def count_packed() -> list[str]:
    """Return the task ids of the observed calls that are packed from a template from now on."""
    packed: list[str] = []
    refill = MessageTemplates.refill

    def noted(self: MessageTemplates, *args: Any) -> Any:
        message = refill(self, *args)
        if message is not None:
            packed.append(message.id)
        return message

    setattr(MessageTemplates, "refill", noted)  # noqa: B010 - mypy
    return packed


def main(tool_name: str, order: str, url: str) -> None:
    tool = TOOLS[tool_name]()
    if order == "first":
        tool.begin()
    app: Any = Celery("shop", broker=url)
    app.conf.update(dq_buffer_folder="")
    celery_dq.setup(app)

    def work(a: int) -> None: ...

    task = app.task(name="known", shared=False)(work)
    calls: list[Callable[..., Any]] = [
        lambda **options: task.apply_async((1,), **options),
        lambda **options: app.send_task("known", (1,), **options),
    ]
    if tool_name == "sentry":
        # OpenTelemetry does not end the span of a task that this process does not know.
        calls.append(lambda **options: app.send_task("known elsewhere", (1,), **options))
    if order == "last":
        for call in calls * 3:
            call(buffered=True)
            call(buffered=False)
        with app.dq.buffer.buffered():
            for _ in range(3):
                task.delay(1)  # installs the fast path on the task
        tool.begin()
    packed = count_packed()
    made = []
    for call in calls:
        for options in ({"buffered": True}, {"buffered": False}):
            for number in range(3):
                with tool.trace(f"request {number}") as trace_id:
                    made.append((call(**options).id, trace_id))
    with app.dq.buffer.buffered():
        for number in range(3):
            with tool.trace(f"request {number}") as trace_id:
                made.append((task.delay(1).id, trace_id))
    assert app.dq.buffer.flush(30) == 0
    print(json.dumps({"made": made, "packed": packed, "spans": tool.spans()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
