"""``apply_async`` in instrumented applications: OpenTelemetry, Sentry, task-sent events; and without them.

Tools replace methods of Celery for the whole process, so each measurement is a process of its own:
``python -m benchmarks.instrumented TOOL WAY AMOUNT``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from benchmarks.buffering import WAYS, flush, shop
from benchmarks.measure import Report, dump, interleave, ratio
from celery_dq.testing.servers import RedisServer

TOOLS = ("plain", "opentelemetry", "sentry", "events")


def instrumented(quick: bool) -> Report:
    """Measure ``apply_async`` from one thread under each tool, until the broker has all messages."""
    report = Report("instrumented")
    report.header = ["tool", "way", "to the broker/s", "vs stock with the tool", "calls/s", "cpu µs/call"]
    report.notes.append("one thread, inside a span of the tool, which samples each call; nothing is exported")
    contenders = [f"{tool} {way}" for tool in TOOLS for way in WAYS]
    found = interleave(contenders, 3 if quick else 7, partial(_process, 1_000 if quick else 5_000), 400)
    for name in contenders:
        tool, _, way = name.partition(" ")
        row, stock = found[name], found[f"{tool} stock"]
        report.row(tool, way, row["rate"], ratio(row["rate"], stock["rate"]), row["calls"], row["cpu"])
    report.data = dump(found)
    return report


def _process(amount: int, name: str) -> dict[str, float]:
    tool, _, way = name.partition(" ")
    program = [sys.executable, "-W", "ignore", "-m", "benchmarks.instrumented", tool, way, str(amount)]
    ran = subprocess.run(program, capture_output=True, text=True, check=True, timeout=300)
    figures: dict[str, float] = json.loads(ran.stdout)
    return figures


def _opentelemetry() -> AbstractContextManager[Any]:
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.trace import TracerProvider

    provider, instrumentor = TracerProvider(), CeleryInstrumentor()  # type: ignore[no-untyped-call]  # untyped there
    instrumentor.instrument(tracer_provider=provider)
    return provider.get_tracer(__name__).start_as_current_span("request")


def _sentry() -> AbstractContextManager[Any]:
    import sentry_sdk
    from sentry_sdk.integrations.celery import CeleryIntegration

    sentry_sdk.init(
        dsn="http://key@127.0.0.1:1/1",
        traces_sample_rate=1.0,
        default_integrations=False,
        integrations=[CeleryIntegration()],
        before_send_transaction=lambda event, hint: None,
    )
    return sentry_sdk.start_transaction(name="request")


SPANS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "opentelemetry": _opentelemetry,
    "sentry": _sentry,
}


def main(tool: str, way: str, amount: int) -> None:
    """Measure calls under one tool, and print the figures in JSON."""
    span = SPANS.get(tool, nullcontext)()
    conf = {"task_send_sent_event": True} if tool == "events" else {}
    with RedisServer() as server, shop(way, server, **conf) as task, span:
        task.app.set_current()  # OpenTelemetry looks for the task there
        cpu, started = time.thread_time(), time.perf_counter()
        for _ in range(amount):
            task.apply_async((42, "A-1"))
        called, cpu = time.perf_counter() - started, time.thread_time() - cpu
        flush(task.app)
        ended = time.perf_counter() - started
    print(json.dumps({"rate": amount / ended, "calls": amount / called, "cpu": cpu / amount * 1e6}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
