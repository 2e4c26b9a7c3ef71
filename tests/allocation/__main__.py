"""The fault run: ``python -m tests.allocation [--rounds N] [--seed S] [--workers N] [fault …]``."""

from __future__ import annotations

import argparse
import random
import sys

from tests.allocation.siege import FAULTS, Siege


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", help=f"which; default all: {', '.join(FAULTS)}")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--partitions", type=int, default=8)
    parser.add_argument("--rate", type=float, default=5.0, help="messages per second into each partition")
    parser.add_argument("--pool", default="threads")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with Siege(options.workers, options.partitions, options.rate, options.pool, options.seed) as siege:
        for _ in range(options.rounds):
            faults = list(options.faults or FAULTS)
            chance.shuffle(faults)
            for fault in faults:
                print(fault, flush=True)
                siege.suffer(fault)
        verdict = siege.judge()
    print(verdict)
    return 0 if verdict.sound else 1


if __name__ == "__main__":
    sys.exit(main())
