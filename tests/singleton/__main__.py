"""The fault run: ``python -m tests.singleton [--rounds N] [--seed S] [--tick MS] [--pool P] [fault …]``."""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.singleton.siege import FAULTS, PACE_S, Siege


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", help=f"which; default all: {', '.join(FAULTS)}")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tick", type=int, default=500, help="tickTime of the ensemble, ms")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pool", default="prefork", help="of the workers, with one slot")
    parser.add_argument("--pace", type=float, default=PACE_S, help="seconds between two messages")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    session_s = max(2.0, 2.5 * options.tick / 1000)
    with Siege(
        tick_ms=options.tick,
        session_s=session_s,
        workers=options.workers,
        pool=options.pool,
        pace_s=options.pace,
    ) as siege:
        for _ in range(options.rounds):
            faults = list(options.faults or FAULTS)
            chance.shuffle(faults)
            for fault in faults:
                began = time.monotonic()
                siege.suffer(fault)
                name, silence = siege.verdict.outages[-1]
                print(f"{name:24} {time.monotonic() - began:6.1f} s, silence {silence:5.2f} s", flush=True)
        verdict = siege.judge()
    print(verdict)
    return 0 if verdict.sound else 1


if __name__ == "__main__":
    sys.exit(main())
