"""The cost of a message at low and steady rates, where nothing batches, in workers with Celery's defaults."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any

from benchmarks.measure import Report, ServerProbe, benchmark, chosen, interleave, quantiles_ms, steadily
from benchmarks.shop import NAME, WAIT, add_tasks
from benchmarks.workers import settings, worker_of
from celery_dq.testing.servers import RedisServer
from tests.brokers import ACTIVE, BROKERS
from tests.workers import ROOT, app_from_environment, environment

RATES, QUICK_RATES = (10, 100, 500, 1_000, 5_000), (100, 500)
WORKERS = (1, 4)
#: The period of a rate, in seconds and in messages, whichever is less.
PERIOD_S, QUICK_PERIOD_S, PERIOD_MESSAGES = 10.0, 3.0, 4_000
#: Messages/s of one publishing process. More would measure the publisher.
PER_PUBLISHER = 1_000
#: Seconds without a report after which the rest counts as not run.
PATIENCE_S = 10.0


@benchmark(
    "msgs/s | workers | broker | redis µs/msg | vs stock | scripts/msg | commands/msg | trips/msg | p50 ms"
    " | p99 ms | p99 vs stock | run/s | share run",
    """
    apply_async to task, early acks; prefork workers with two processes and the defaults
    redis µs: used_cpu_user + used_cpu_sys, heartbeats and events of the workers included
    scripts: EVALSHA and EVAL; commands: all in INFO commandstats, those of scripts included
    trips: total_reads_processed, the number of times that Redis has read from a socket
    p50, p99: from the call to the first line of the task; run/s: below msgs/s where the CPU is full
    each round: {longest:g} s, or {messages:,} messages where these are fewer
    """,
)
def trickle(report: Report, quick: bool, only: str = "") -> None:
    """Redis CPU, script calls, commands and round trips per message, and its latency, by rate and workers."""
    cases = {
        f"{rate}/s, {workers} worker{'s' * (workers > 1)}": (rate, workers)
        for rate in (QUICK_RATES if quick else RATES)
        for workers in WORKERS
    }
    longest = QUICK_PERIOD_S if quick else PERIOD_S
    report.fill_in(longest=longest, messages=PERIOD_MESSAGES)
    for case in chosen(list(cases), only):
        rate, workers = cases[case]
        print(f"   {case}", flush=True)
        seconds = min(longest, PERIOD_MESSAGES / rate)
        found = interleave(ACTIVE, 1 if quick else 3, partial(_round, rate, workers, seconds), 240)
        columns = "cpu | vs cpu | scripts | commands | trips | p50 | p99 | vs p99 | rate | run"
        report.compare(found, "stock", columns, rate, workers)


def _round(rate: int, workers: int, seconds: float, broker: str) -> dict[str, float]:
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer())
        reports = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        reports.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        reports.bind(("127.0.0.1", 0))
        reports.settimeout(PATIENCE_S)
        conf = settings(BROKERS[broker].url(server.port), report_port=reports.getsockname()[1])
        for number in range(workers):
            stack.enter_context(worker_of(broker, conf, name=f"w{number}", arguments=()))
        publish = partial(_publish, broker, conf)
        # The first messages load the scripts, and make the connections of the workers.
        with publish(50, 1.0) as begin:
            begin()
            list(waits(reports, 1 + 50))
        publishers = math.ceil(rate / PER_PUBLISHER)
        # The first call of a process connects and learns the task's template. In the period it would delay
        # the next calls, which would then come as a burst.
        begins = [stack.enter_context(publish(rate / publishers, seconds)) for _ in range(publishers)]
        list(waits(reports, publishers))
        probe = stack.enter_context(closing(ServerProbe(server.port)))
        before = _counts(probe)
        started = time.monotonic()
        for begin in begins:
            begin()
        amount = publishers * int(rate / publishers * seconds)
        seen, last = [], started
        for wait in waits(reports, amount):
            seen.append(wait)
            last = time.monotonic()
        spent = {key: value - before[key] for key, value in _counts(probe).items()}
    return {
        "cpu": spent["cpu"] / max(1, len(seen)) * 1e6,
        **{key: spent[key] / max(1, len(seen)) for key in ("scripts", "commands", "trips")},
        **quantiles_ms(seen),
        "rate": len(seen) / (last - started),
        "run": len(seen) / amount,
    }


def waits(reports: socket.socket, amount: int) -> Iterator[float]:
    """Yield the reports of `amount` tasks, in seconds; end when no report comes."""
    with suppress(TimeoutError):
        for _ in range(amount):
            yield WAIT.unpack(reports.recv(WAIT.size))[0]


@contextmanager
def _publish(broker: str, conf: dict[str, Any], rate: float, seconds: float) -> Iterator[Callable[[], None]]:
    """Publish one message from another process, and the others when the yielded function is called.

    The block lasts until all is published.
    """
    command = [sys.executable, "-m", "benchmarks.trickle", str(rate), str(seconds)]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(BROKERS[broker], conf), stdin=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        try:
            yield process.stdin.close
            process.wait(60)
        finally:
            process.kill()


def _counts(probe: ServerProbe) -> dict[str, float]:
    calls = {name: row["calls"] for name, row in probe.info("commandstats").items()}
    return {
        "cpu": probe.cpu_seconds(),
        "scripts": sum(calls.get(f"cmdstat_{name}", 0) for name in ("evalsha", "eval", "fcall")),
        "commands": sum(calls.values()),
        "trips": probe.info("stats")["total_reads_processed"],
    }


def _main(rate: float, seconds: float) -> None:
    """Publish at a steady rate; what is late is published at once."""
    app = add_tasks(app_from_environment(NAME), 0)
    trickled = app.tasks["trickled"]
    with app.producer_pool.acquire(block=True) as producer:
        trickled.apply_async((time.monotonic(),), producer=producer)
        sys.stdin.read()  # the first message is over, and the period begins
        for _ in steadily(rate, seconds):
            trickled.apply_async((time.monotonic(),), producer=producer)


if __name__ == "__main__":
    _main(float(sys.argv[1]), float(sys.argv[2]))
