"""The cost of ``apply_async`` in several checkouts, in turn: ``python -m benchmarks.call_cost TREE TREE …``.

A change to the path of a call is compared with the commit before it:
``git worktree add ../before main; python -m benchmarks.call_cost ../before .``. A round starts one process
per checkout, with the package and the benchmarks of that checkout.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.buffering import flush, shop
from benchmarks.measure import Report, interleave, spending
from celery_dq.testing.servers import RedisServer

#: Name of the calls -> way of the app, options of the calls, how many.
CALLS: dict[str, tuple[str, dict[str, Any], int]] = {
    "buffered": ("buffered", {}, 50_000),
    "buffered, own headers": ("buffered", {"headers": {"trace": "1"}}, 25_000),
    "direct": ("dq", {}, 5_000),
    "direct, own headers": ("dq", {"headers": {"trace": "1"}}, 5_000),
}


def compare(trees: list[str], rounds: int) -> Report:
    """Measure the calling thread's CPU time and the whole process's, in µs per call."""
    report = Report("call_cost")
    report.header = ["calls", "checkout", "µs of the caller", f"vs {trees[0]}", "µs of the process"]
    report.header += ["µs of Redis", "switches", "calls/s"]
    report.notes += [
        "CPU time, median (min-max); process: with the flusher, until the broker has all messages",
        "switches: how often a thread of the process waited, per 1,000 calls",
        "calls/s: of the caller by the clock on the wall",
    ]
    found = interleave(trees, rounds, _measure_tree, 3_600)
    for calls in CALLS:
        columns = "{0}: caller | vs {0}: caller | {0}: process | {0}: redis | {0}: switches | {0}: rate"
        report.compare(found, trees[0], columns.format(calls), calls)
    return report


def _measure_tree(tree: str) -> dict[str, float]:
    program = [sys.executable, "-m", "benchmarks.call_cost", "--measure"]
    environment = {**os.environ, "PYTHONPATH": str(Path(tree).resolve())}
    ran = subprocess.run(program, env=environment, cwd=tree, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return figures


def measure() -> dict[str, float]:
    """Measure all kinds of calls in this process."""
    figures = {}
    with RedisServer() as server:
        for calls, (way, options, amount) in CALLS.items():
            with shop(way, server) as task:
                for _ in range(1_000):
                    task.apply_async((42, "A-1"), **options)
                flush(task.app)
                gc.collect()
                switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
                with spending(server.port) as spent:
                    caller, started = time.thread_time(), time.perf_counter()
                    for _ in range(amount):
                        task.apply_async((42, "A-1"), **options)
                    caller, called = time.thread_time() - caller, time.perf_counter() - started
                    flush(task.app)
                switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - switches
            figures[f"{calls}: caller"] = caller / amount * 1e6
            figures[f"{calls}: process"] = spent.own_s / amount * 1e6
            figures[f"{calls}: redis"] = sum(spent.redis_s) / amount * 1e6
            figures[f"{calls}: switches"] = switches / amount * 1e3
            figures[f"{calls}: rate"] = amount / called
    return figures


def main() -> None:
    """Compare the checkouts that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.call_cost", description=__doc__)
    parser.add_argument("trees", nargs="*", metavar="TREE", help="a checkout; default: this one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", action="store_true", help="measure the package on the path, print JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure()))
    else:
        print(compare(options.trees or ["."], options.rounds).text())


if __name__ == "__main__":
    main()
