"""One worker on one queue: throughput, commands, idle cost and start-up by the number of its partitions."""

from __future__ import annotations

from functools import partial

from benchmarks.many_queues import IDLE_S, QUICK_IDLE_S, heartbeat_ms, run_in_queues
from benchmarks.measure import Report, benchmark, interleave
from celery_dq.keys import PartitionKeys

PARTITIONS = ("1", "4", "64")
TENANTS = 1_000


@benchmark(
    "partitions | messages/s | vs 1 | cmds/msg | idle CPU % | idle cmds/s | heartbeat ms | start s",
    f"""
    threads pool with 2 slots, Celery's default prefetch multiplier, no events
    no-op tasks of {TENANTS:,} tenants, published before the worker starts
    cmds: commands that Redis has executed, those inside scripts included
    heartbeat: one round over all leases; start: from the process to worker_ready
    """,
)
def partitions(report: Report, quick: bool) -> None:
    """Measure one worker on a queue with several partitions, all of them on one Redis."""
    amount, idle_s = (2_000, QUICK_IDLE_S) if quick else (12_000, IDLE_S)
    found = interleave(PARTITIONS, 1 if quick else 3, partial(_round, amount, idle_s), 300)
    columns = "rate | vs rate | commands | idle_cpu | idle_commands | heartbeat | start"
    report.compare(found, "1", columns)


def _round(amount: int, idle_s: float, count: str) -> dict[str, float]:
    def options(number: int) -> dict[str, str]:
        return {"queue": "push", "tenant": f"t{number % TENANTS}"}

    keys = [PartitionKeys("online", "push", number) for number in range(int(count))]
    conf = {"dq_queues": {"push": {"partitions": int(count)}}}
    return {
        **run_in_queues("dq", ["push"], amount, options, idle_s, **conf),
        "heartbeat": heartbeat_ms(keys),
    }
