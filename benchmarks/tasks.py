"""No-op tasks through a real worker, end to end."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

from benchmarks.measure import Report, benchmark, interleave
from benchmarks.workers import run_backlog
from tests.brokers import ACTIVE
from tests.workers import ROOT

#: Pool -> concurrency.
POOLS = {"solo": 1, "threads": 2, "prefork": 2}


@benchmark(
    "pool | acks | broker | tasks/s | vs stock",
    """
    backlog published first, then the worker starts; Celery's default prefetch multiplier (4), no events
    each task has one argument
    memory: Celery's floor, worker and broker in one process
    """,
)
def tasks(report: Report, quick: bool) -> None:
    """Measure no-op tasks/s from the first to the last of a backlog, by pool and kind of acks."""
    amount, rounds = (1_000, 1) if quick else (6_000, 3)
    for pool in POOLS:
        for acks in ("early", "late"):
            contenders = [*ACTIVE, "memory"] if pool == "solo" else ACTIVE
            found = interleave(contenders, rounds, partial(_round, pool, acks, amount), 90)
            report.compare(found, "stock", "rate | vs rate", pool, acks)


def _round(pool: str, acks: str, amount: int, broker: str) -> dict[str, float]:
    if broker != "memory":
        return run_backlog(broker, amount, pool, POOLS[pool], task_acks_late=acks == "late")
    program = [sys.executable, "-m", "benchmarks.shop", str(amount), acks, pool]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return {"rate": amount / float(done.stdout.split()[-1])}
