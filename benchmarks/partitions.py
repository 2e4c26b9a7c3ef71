"""One worker on one queue: throughput, commands, idle cost and start-up by the number of its partitions."""

from __future__ import annotations

from functools import partial

from benchmarks.many_queues import IDLE_S, QUICK_IDLE_S, heartbeat_ms, run_backlog
from benchmarks.measure import Report, Series, dump, interleave, ratio
from celery_dq.keys import PartitionKeys

PARTITIONS = ("1", "4", "64")
TENANTS = 1_000


def partitions(quick: bool) -> Report:
    """Measure one worker on a queue with several partitions, all of them on one Redis."""
    report = Report("partitions")
    report.header = ["partitions", "messages/s", "vs 1", "cmds/msg", "idle CPU %", "idle cmds/s"]
    report.header += ["heartbeat ms", "start s"]
    report.notes.append("threads pool with 2 slots, Celery's default prefetch multiplier, no events")
    report.notes.append(f"no-op tasks of {TENANTS:,} tenants, published before the worker starts")
    report.notes.append("cmds: commands that Redis has executed, those inside scripts included")
    report.notes.append("heartbeat: one round over all leases; start: from the process to worker_ready")
    amount, idle_s = (2_000, QUICK_IDLE_S) if quick else (12_000, IDLE_S)
    found = interleave(PARTITIONS, 1 if quick else 3, partial(_round, amount, idle_s), 300)
    alone: Series = found["1"]["rate"]
    for count, row in found.items():
        rest = [row[key] for key in ("commands", "idle_cpu", "idle_commands", "heartbeat", "start")]
        report.row(count, row["rate"], ratio(row["rate"], alone), *rest)
    report.data["partitions"] = dump(found)
    return report


def _round(amount: int, idle_s: float, count: str) -> dict[str, float]:
    settings = {"dq_queues": {"push": {"partitions": int(count)}}}

    def options(number: int) -> dict[str, str]:
        return {"queue": "push", "tenant": f"t{number % TENANTS}"}

    keys = [PartitionKeys("online", "push", number) for number in range(int(count))]
    row = run_backlog("dq", ["push"], amount, options, idle_s, settings)
    return {**row, "heartbeat": heartbeat_ms(keys)}
