"""A singleton queue beside the same queue without a leader: the cost of strict order."""

from __future__ import annotations

from functools import partial

from benchmarks.measure import Report, benchmark, dump, interleave, ratio
from benchmarks.workers import run_backlog

#: One slot each, because a singleton queue runs one message at a time.
POOLS = ("solo", "threads", "prefork")
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
    for pool in POOLS:
        once = partial(_round, pool, 1_000 if quick else 5_000)
        found = interleave(list(KINDS), 1 if quick else 5, once, 120)
        for kind, peer in KINDS.items():
            report.row(pool, kind, found[kind]["rate"], ratio(found[kind]["rate"], found[peer]["rate"]))
        report.data[pool] = dump(found)


def _round(pool: str, amount: int, kind: str) -> dict[str, float]:
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
