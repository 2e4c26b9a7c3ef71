"""``python -m tests.chaos``: seeded faults against a broker, and the verdict.

Examples::

    python -m tests.chaos --broker dq --seed 7 --messages 20000 --kills 40 --others 10 --pool prefork
    python -m tests.chaos --broker stock --broker dq --seed 7       # one after the other, beside each other
    python -m tests.chaos --broker dq --sentinel --messages 5000    # a Sentinel pair, with failovers
    python -m tests.chaos --cluster --messages 5000                 # a Redis Cluster, with failovers
    python -m tests.chaos --broker dq --partitions 4 --modes change-partitions,kill-worker,warm
    python -m tests.chaos --broker stock --modes kill-worker,kill-child

Exit code 1 when a broker with leases lost a message, left one stuck, ran one twice without a reason, or
took longer than lease + 2 s to recover. On the stock transport the figures are printed, but not judged.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path

from tests.brokers import ACTIVE, BROKERS
from tests.chaos.driver import Plan, log_to_stderr, run
from tests.chaos.faults import CHANGE, FAILOVER, KILL, MOVE_SLOT, WEIGHTS

MODES = (KILL, *WEIGHTS, FAILOVER, MOVE_SLOT, CHANGE)
#: Seconds beyond the lease that recovery may take.
RECOVERY_ALLOWANCE = 2.0
#: Help of the options that are parameters of a plan.
HELP = {
    "kills": "SIGKILLs of workers",
    "others": "faults of the other modes",
    "concurrency": "of each worker",
    "partitions": (
        "of the queue; with several, change-partitions changes their number and spreads of tenants, and "
        "every other tenant's messages are buffered (a cluster begins with 6)"
    ),
    "work_ms": "mean length of a task",
    "ahead": "most messages that are published and not finished",
    "lease": "seconds",
    "patience": "seconds without progress",
    "confirm_replicas": (
        "with --sentinel or --cluster: dq_confirm_replicas; 0 shows what a failover may lose"
    ),
    "visibility_timeout": "stock only",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Only brokers on Redis, because the program starts a Redis and commits faults on that server.
    parser.add_argument("--broker", action="append", choices=sorted(ACTIVE), help="repeat to run several")
    for field in fields(Plan):
        if field.name not in ("modes", "sentinel", "cluster", "pool"):
            name, kind = field.name.replace("_", "-"), type(field.default)
            parser.add_argument(f"--{name}", type=kind, default=field.default, help=HELP.get(field.name))
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated; default all: %(default)s")
    parser.add_argument("--pool", default=Plan.pool, choices=["prefork", "threads", "solo", "gevent"])
    parser.add_argument(
        "--sentinel", action="store_true", help="a Sentinel pair instead of one server with AOF"
    )
    parser.add_argument(
        "--cluster", action="store_true", help="dq-rediscluster:// on three masters and three replicas"
    )
    parser.add_argument("--json", type=Path, help="write the verdicts there")
    options = parser.parse_args(arguments)
    modes = tuple(mode.strip() for mode in options.modes.split(",") if mode.strip())
    if unknown := set(modes) - set(MODES):
        parser.error(f"unknown modes {', '.join(sorted(unknown))}: choose from {', '.join(MODES)}")
    plan = Plan(**{**{each.name: getattr(options, each.name) for each in fields(Plan)}, "modes": modes})
    failed, verdicts = False, {}
    for name in ["cluster"] if options.cluster else options.broker or ACTIVE:
        broker = BROKERS[name]
        verdict = run(broker, plan, log_to_stderr)
        print(f"== {name}, seed {plan.seed}\n{verdict.report()}", flush=True)
        verdicts[name] = asdict(verdict)
        if broker.has_leases:
            slowest = max(verdict.slowest_recovery, verdict.undisturbed[-1])
            failed |= not verdict.good or slowest > plan.lease + RECOVERY_ALLOWANCE
    if options.json is not None:
        options.json.write_text(json.dumps({"plan": asdict(plan), "verdicts": verdicts}, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
