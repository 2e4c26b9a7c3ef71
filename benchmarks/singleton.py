"""A singleton queue beside the same queue without a leader: the cost of strict order."""

from __future__ import annotations

from functools import partial
from typing import Any

import redis

from benchmarks.measure import Report, dump, interleave, ratio
from benchmarks.shop import NAME, add_tasks
from celery_dq.testing.servers import RedisServer
from tests.brokers import DQ
from tests.workers import WorkerProcess, make_app

#: One slot each, because a singleton queue runs one message at a time.
POOLS = ("solo", "threads", "prefork")
#: A singleton queue is compared with a plain queue with the same kind of acks.
KINDS = {
    "plain": "plain",
    "singleton": "plain",
    "plain, late acks": "plain, late acks",
    "singleton, late acks": "plain, late acks",
}


def singleton(quick: bool) -> Report:
    """Measure no-op tasks/s through one slot, with and without a leader."""
    report = Report("singleton")
    report.header = ["pool", "queue", "tasks/s", "vs plain"]
    report.notes.append("one slot; backlog published first; the election is held by the broker")
    report.notes.append(
        "worker_prefetch_multiplier = 64, which the guide recommends for short tasks of a singleton queue"
    )
    amount = 1_000 if quick else 5_000
    for pool in POOLS:
        found = interleave(list(KINDS), 1 if quick else 5, partial(_round, pool, amount), 120)
        for kind, peer in KINDS.items():
            report.row(pool, kind, found[kind]["rate"], ratio(found[kind]["rate"], found[peer]["rate"]))
        report.data[pool] = dump(found)
    return report


def _round(pool: str, amount: int, kind: str) -> dict[str, float]:
    with RedisServer() as server, RedisServer() as clock:
        conf: dict[str, Any] = {
            "broker_url": DQ.url(server.port),
            "clock_port": clock.port,
            "worker_prefetch_multiplier": 64,
            "task_default_queue": "ledger",
            "task_acks_late": kind.endswith("late acks"),
            "dq_singleton_queues": ["ledger"] if kind.startswith("singleton") else [],
        }
        app = add_tasks(make_app(NAME, DQ, conf), clock.port)
        with app.producer_pool.acquire(block=True) as producer:
            app.tasks["mark"].apply_async(("begin",), producer=producer)
            for _ in range(amount):
                app.tasks["noop"].apply_async(producer=producer)
            app.tasks["mark"].apply_async(("end",), producer=producer)
        worker = WorkerProcess(
            "benchmarks.shop", broker=DQ, conf=conf, pool=pool, concurrency=1, loglevel="WARNING"
        )
        with worker, redis.Redis(port=clock.port, socket_timeout=None) as client:
            begin, end = client.blpop(["begin"], timeout=60), client.blpop(["end"], timeout=120)
        app.close()
    if begin is None or end is None:
        raise TimeoutError(f"{kind} did not run {amount} tasks in {pool}")
    return {"rate": amount / (float(end[1]) - float(begin[1]))}
