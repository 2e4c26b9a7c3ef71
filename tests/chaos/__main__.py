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
from dataclasses import asdict
from pathlib import Path

from tests.brokers import ACTIVE, BROKERS
from tests.chaos.driver import Plan, log_to_stderr, run
from tests.chaos.faults import CHANGE, FAILOVER, KILL, MOVE_SLOT, WEIGHTS

MODES = (KILL, *WEIGHTS, FAILOVER, MOVE_SLOT, CHANGE)
#: Seconds beyond the lease that recovery may take.
RECOVERY_ALLOWANCE = 2.0


def main(arguments: list[str] | None = None) -> int:
    defaults = Plan()
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Only brokers on Redis, because the program starts a Redis and commits faults on that server.
    parser.add_argument("--broker", action="append", choices=sorted(ACTIVE), help="repeat to run several")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--messages", type=int, default=defaults.messages)
    parser.add_argument("--kills", type=int, default=defaults.kills, help="SIGKILLs of workers")
    parser.add_argument("--others", type=int, default=defaults.others, help="faults of the other modes")
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated; default all: %(default)s")
    parser.add_argument("--workers", type=int, default=defaults.workers)
    parser.add_argument("--concurrency", type=int, default=defaults.concurrency, help="of each worker")
    parser.add_argument("--pool", default=defaults.pool, choices=["prefork", "threads", "solo", "gevent"])
    parser.add_argument("--tenants", type=int, default=defaults.tenants)
    parser.add_argument(
        "--partitions",
        type=int,
        default=defaults.partitions,
        help="of the queue; with several, change-partitions changes their number and spreads of tenants, and "
        "every other tenant's messages are buffered (a cluster begins with 6)",
    )
    parser.add_argument("--work-ms", type=float, default=defaults.work_ms, help="mean length of a task")
    parser.add_argument(
        "--ahead", type=int, default=defaults.ahead, help="most messages that are published and not finished"
    )
    parser.add_argument("--lease", type=float, default=defaults.lease, help="seconds")
    parser.add_argument("--patience", type=float, default=defaults.patience, help="seconds without progress")
    parser.add_argument(
        "--sentinel", action="store_true", help="a Sentinel pair instead of one server with AOF"
    )
    parser.add_argument(
        "--cluster", action="store_true", help="dq-rediscluster:// on three masters and three replicas"
    )
    parser.add_argument(
        "--confirm-replicas",
        type=int,
        default=defaults.confirm_replicas,
        help="with --sentinel or --cluster: dq_confirm_replicas; 0 shows what a failover may lose",
    )
    parser.add_argument(
        "--visibility-timeout", type=float, default=defaults.visibility_timeout, help="stock only"
    )
    parser.add_argument("--json", type=Path, help="write the verdicts there")
    options = parser.parse_args(arguments)
    modes = tuple(mode.strip() for mode in options.modes.split(",") if mode.strip())
    if unknown := set(modes) - set(MODES):
        parser.error(f"unknown modes {', '.join(sorted(unknown))}: choose from {', '.join(MODES)}")
    plan = Plan(
        seed=options.seed,
        messages=options.messages,
        kills=options.kills,
        others=options.others,
        workers=options.workers,
        concurrency=options.concurrency,
        pool=options.pool,
        tenants=options.tenants,
        partitions=options.partitions,
        work_ms=options.work_ms,
        ahead=options.ahead,
        lease=options.lease,
        patience=options.patience,
        modes=modes,
        sentinel=options.sentinel,
        cluster=options.cluster,
        confirm_replicas=options.confirm_replicas,
        visibility_timeout=options.visibility_timeout,
    )
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
