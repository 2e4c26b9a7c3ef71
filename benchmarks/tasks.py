"""A real worker: its rate of no-op tasks, also in a singleton queue, its latency when idle, and its start."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial

import psutil
import redis
from kombu import pools

from benchmarks.measure import Report, benchmark, dump, interleave, quantiles_ms, ratio
from benchmarks.workers import app_of, run_backlog, settings, worker_of
from celery_dq.testing.servers import RedisServer
from tests.brokers import ACTIVE, BROKERS
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


#: One slot each, because a singleton queue runs one message at a time.
SINGLETON_POOLS = ("solo", "threads", "prefork")
#: A singleton queue is compared with a plain queue with the same kind of acks.
KINDS = {
    "plain": "plain",
    "singleton": "plain",
    "plain, late acks": "plain, late acks",
    "singleton, late acks": "plain, late acks",
}


@benchmark(
    "pool | queue | tasks/s | vs plain",
    """
    one slot; backlog published first; the election is held by the broker
    worker_prefetch_multiplier = 64, which the guide recommends for short tasks of a singleton queue
    """,
)
def singleton(report: Report, quick: bool) -> None:
    """Measure no-op tasks/s through one slot, with and without a leader."""
    for pool in SINGLETON_POOLS:
        once = partial(_run_kind, pool, 1_000 if quick else 5_000)
        found = interleave(list(KINDS), 1 if quick else 5, once, 120)
        for kind, peer in KINDS.items():
            report.row(pool, kind, found[kind]["rate"], ratio(found[kind]["rate"], found[peer]["rate"]))
        report.data[pool] = dump(found)


def _run_kind(pool: str, amount: int, kind: str) -> dict[str, float]:
    return run_backlog(
        "dq",
        amount,
        pool,
        1,
        worker_prefetch_multiplier=64,
        task_default_queue="ledger",
        task_acks_late=kind.endswith("late acks"),
        dq_singleton_queues=["ledger"] if kind.startswith("singleton") else [],
    )


@benchmark(
    "pool | broker | p50 ms | p99 ms | p50 vs stock | p99 vs stock",
    "the next one is sent when the last has run",
)
def latency(report: Report, quick: bool) -> None:
    """Milliseconds from ``apply_async`` to the task's first line, one at a time on an idle worker."""
    for pool in ("solo", "prefork"):
        found = interleave(
            ACTIVE, 2 if quick else 5, partial(_wait_for_each, pool, 100 if quick else 400), 90
        )
        report.compare(found, "stock", "p50 | p99 | vs p50 | vs p99", pool)


def _wait_for_each(pool: str, amount: int, broker: str) -> dict[str, float]:
    with RedisServer() as server, RedisServer() as clock:
        conf = settings(BROKERS[broker].url(server.port), clock.port)
        waits: list[float] = []
        with (
            app_of(broker, conf) as app,
            worker_of(broker, conf, pool=pool, concurrency=1),
            redis.Redis(port=clock.port, socket_timeout=None) as client,
        ):
            for _ in range(amount + 10):
                app.tasks["stamp"].apply_async((time.monotonic(),))
                stamped = client.blpop(["stamps"], timeout=30)
                if stamped is None:
                    raise TimeoutError(f"{broker} did not run a task within 30 s")
                waits.append(float(stamped[1]))
        pools.reset()
    # The first calls include the cost of new connections.
    return quantiles_ms(waits[10:])


STARTED_POOLS = {"solo": 1, "prefork": 2}


@benchmark(
    "pool | broker | s until it consumes | vs stock | MB | vs stock",
    """
    from the start of the process to the signal worker_ready; prefork has two processes
    MB: memory that no other process shares (USS), summed over the worker's processes
    """,
)
def startup(report: Report, quick: bool) -> None:
    """Measure the start of an idle worker in a new process, and the memory of all its processes."""
    for pool in STARTED_POOLS:
        found = interleave(ACTIVE, 2 if quick else 9, partial(_start, pool), 120)
        report.compare(found, "stock", "seconds | vs seconds | memory | vs memory", pool)


def _start(pool: str, broker: str) -> dict[str, float]:
    with RedisServer() as server:
        conf = settings(BROKERS[broker].url(server.port))
        started = time.monotonic()
        with worker_of(broker, conf, pool=pool, concurrency=STARTED_POOLS[pool], arguments=()) as worker:
            seconds = time.monotonic() - started
            processes = [psutil.Process(worker.pid), *worker.children()]
            memory = sum(process.memory_full_info().uss for process in processes)
    return {"seconds": seconds, "memory": memory / 1e6}
