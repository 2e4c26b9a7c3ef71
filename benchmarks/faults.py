"""The chaos programs, summarised."""

from __future__ import annotations

from dataclasses import asdict, replace

from benchmarks.measure import Report, benchmark
from tests.brokers import ACTIVE, BROKERS
from tests.chaos.driver import Plan, log_to_stderr, run

#: These runs take minutes; ``make chaos`` does longer ones.
PLAN = Plan(seed=7, messages=20_000, kills=30, workers=3, work_ms=2.0, patience=15.0)


@benchmark(
    "broker | messages | faults | lost | stuck | ran again | without reason | slowest recovery s",
    "seed {seed}, lease {lease:g} s; python -m tests.chaos runs it at any length",
)
def faults(report: Report, quick: bool) -> None:
    """Measure lost, stuck and repeated messages and the recovery time, with the same seed on each broker."""
    plan = replace(PLAN, messages=1_500, kills=6, patience=6.0, lease=2.0) if quick else PLAN
    report.fill_in(seed=plan.seed, lease=plan.lease)
    for name in ACTIVE:
        verdict = run(BROKERS[name], plan, log_to_stderr)
        cells = (len(verdict.lost), len(verdict.stuck), verdict.duplicated, len(verdict.unattributable))
        recovery = f"{verdict.slowest_recovery:.1f}"
        report.row(name, verdict.confirmed, sum(verdict.faults.values()), *cells, recovery)
        report.data[name] = asdict(verdict)
