"""The app of a traced producer and worker: their spans go to the list ``spans`` in Redis.

``python -m tests.broker.traced_shop`` makes one buffered call of each task, each in a trace of its own, and
prints the traces by task. A worker sets its tracer up before it forks, or with ``traced_in_children`` in each
child of its pool only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import redis
from celery.signals import worker_init, worker_process_init
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

import celery_dq
from tests.workers import ENVIRONMENT, app_from_environment


class RedisExporter(SpanExporter):
    """Writes each span as JSON."""

    def __init__(self, url: str) -> None:
        self._url = url

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with redis.Redis.from_url(self._url) as client:
            client.rpush("spans", *(each.to_json(indent=None) for each in spans))
        return SpanExportResult.SUCCESS


def add_tasks(app: Any) -> None:
    def succeeds() -> None: ...

    def fails() -> None:
        raise ValueError("broken")

    def dies() -> None:
        os._exit(1)

    app.task(shared=False, name="succeeds")(succeeds)
    app.task(shared=False, name="fails")(fails)
    app.task(shared=False, name="dies", acks_late=True, reject_on_worker_lost=True)(dies)


def set_up_tracer(**_: Any) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(RedisExporter(app.conf["spans_url"])))
    trace.set_tracer_provider(provider)


def main() -> None:
    instrumentor: Any = CeleryInstrumentor
    instrumentor().instrument()
    traces = {}
    with app.dq.buffer.buffered():
        for name in ("succeeds", "fails", "dies"):
            with trace.get_tracer(__name__).start_as_current_span(name) as span:
                app.tasks[name].apply_async()
                traces[name] = f"0x{span.get_span_context().trace_id:032x}"
    assert app.dq.buffer.flush(30) == 0
    print(json.dumps(traces))


if ENVIRONMENT in os.environ:
    app: Any = app_from_environment("shop")
    celery_dq.setup(app)
    add_tasks(app)
    if __name__ == "__main__":
        set_up_tracer()
        main()
    else:
        in_children = app.conf.get("traced_in_children")
        (worker_process_init if in_children else worker_init).connect(set_up_tracer)
