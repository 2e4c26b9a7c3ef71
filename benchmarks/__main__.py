"""``python -m benchmarks [name …] [--quick] [--only CASE]``: measures all figures of the README.

Each benchmark runs stock and ours in turn, in the same run, on servers of its own, and bounds its own time.
It prints medians with (min-max) and ratios round by round, and writes JSON, reST tables and plots to
``benchmarks/out/``. From what lies there it makes ``ratios.rst``: all ratios beside the stock transport. With
``--readme`` it writes them, the tables that the guide has marks for, and the curve by tenant count, into
README.rst and the guide.

``--only`` measures a part of a benchmark with long cases. Its files are called ``NAME-part-CASE``, and with
``--readme`` its rows replace those of the same cases in the table of the guide.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.allocation import allocation, rebalancing
from benchmarks.buffering import buffering, outage
from benchmarks.claims import claims
from benchmarks.cluster import cluster
from benchmarks.commands import commands, memory
from benchmarks.counter_cost import counter_cost
from benchmarks.dashboard import dashboard
from benchmarks.dedup import dedup_cost
from benchmarks.fairness import fairness, quiet
from benchmarks.faults import faults
from benchmarks.fleet import model
from benchmarks.fleet_check import fleet_check
from benchmarks.flow_files import flow_files
from benchmarks.latency import latency
from benchmarks.lookups import lookups
from benchmarks.many_queues import many_queues
from benchmarks.many_quotas import many_quotas
from benchmarks.measure import Report, UnknownCaseError
from benchmarks.partitions import partitions
from benchmarks.peers import peers
from benchmarks.plots import plot_claims
from benchmarks.quotas import quotas
from benchmarks.readme import part_of, write_figures
from benchmarks.scrapes import scrapes
from benchmarks.script_calls import script_calls
from benchmarks.singleton import singleton
from benchmarks.startup import startup
from benchmarks.summary import summary
from benchmarks.tasks import tasks
from benchmarks.trickle import trickle
from benchmarks.zookeeper_broker import zookeeper_broker
from benchmarks.zookeeper_queues import zookeeper_queues

OUT = Path(__file__).resolve().parent / "out"

BENCHMARKS: dict[str, Callable[[bool], Report]] = {
    "claims": claims,
    "tasks": tasks,
    "trickle": trickle,
    "latency": latency,
    "startup": startup,
    "many_queues": many_queues,
    "many_quotas": many_quotas,
    "partitions": partitions,
    "lookups": lookups,
    "cluster": cluster,
    "fleet": model,
    "fleet_check": fleet_check,
    "allocation": allocation,
    "rebalancing": rebalancing,
    "peers": peers,
    "commands": commands,
    "memory": memory,
    "script_calls": script_calls,
    "counter_cost": counter_cost,
    "flow_files": flow_files,
    "scrapes": scrapes,
    "dashboard": dashboard,
    "quotas": quotas,
    "fairness": fairness,
    "quiet": quiet,
    "faults": faults,
    "singleton": singleton,
    "dedup": dedup_cost,
    "buffering": buffering,
    "outage": outage,
    "zookeeper_queues": zookeeper_queues,
    "zookeeper_broker": zookeeper_broker,
}

#: Benchmarks of which a part can be measured.
IN_PARTS: dict[str, Callable[[bool, str], Report]] = {
    "claims": claims,
    "trickle": trickle,
    "many_queues": many_queues,
    "many_quotas": many_quotas,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(BENCHMARKS)}; default all")
    parser.add_argument(
        "--out", type=Path, default=OUT, help="folder for the results; default benchmarks/out"
    )
    parser.add_argument(
        "--readme",
        action="store_true",
        help="write the results in --out into README.rst and the guide; without names, measure nothing",
    )
    parser.add_argument("--quick", action="store_true", help="smaller and shorter: a look, not a figure")
    parser.add_argument(
        "--only", default="", metavar="CASE", help=f"cases whose names contain this, of {', '.join(IN_PARTS)}"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}: choose from {', '.join(BENCHMARKS)}")
    if options.only and (not options.names or set(options.names) - set(IN_PARTS)):
        parser.error(f"--only measures a part of {', '.join(IN_PARTS)}: name one of them")
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    for name in options.names or ([] if options.readme else BENCHMARKS):
        started = time.monotonic()
        if options.only:
            try:
                report = IN_PARTS[name](options.quick, options.only)
            except UnknownCaseError as error:
                parser.error(f"--only {options.only!r}: {error}")
            stem = part_of(name, options.only)
        else:
            report, stem = BENCHMARKS[name](options.quick), name
        print(report.text(), f"   took {time.monotonic() - started:.0f} s", sep="\n", flush=True)
        (out / f"{stem}.json").write_text(json.dumps(report.data, indent=1))
        (out / f"{stem}.rst").write_text(report.rst())
        if stem == "claims":
            plot_claims(report.data, out / "claims.png")
    ratios = summary(out)
    if ratios.rows:
        (out / "ratios.rst").write_text(ratios.rst())
        print(ratios.text())
    if options.readme:
        write_figures(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
