"""Replay a day of the shop on celery-dq and on the stock Redis transport."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from celery_dq.testing.servers import RedisServer
from day import report
from day.brokers import BROKERS, DQ, STOCK
from day.director import Day, Options, run_day
from day.plan import LOUD
from day.stage import HOME, StageError


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--broker", choices=[*BROKERS, "both"], default="both", help="default: both, side by side"
    )
    parser.add_argument("--minutes", type=positive, default=0.5, help="length of the replay per broker (0.5)")
    parser.add_argument("--merchants", type=merchants, default=3000, help="number of merchants in all (3000)")
    parser.add_argument(
        "--patience",
        type=float,
        default=15.0,
        help="seconds to wait for what the killed worker had: three times celery-dq's lease here (15)",
    )
    parser.add_argument("--seed", type=int, default=1, help="another seed, another day (1)")
    parser.add_argument(
        "--out", type=Path, default=HOME / "out", help="directory for picture, verdict and logs"
    )
    return parser.parse_args(argv)


def positive(text: str) -> float:
    """Parse a number of minutes."""
    value = float(text)
    if not 0 < value < 24 * 60:
        raise argparse.ArgumentTypeError(f"{text}: a number above 0 is needed, in minutes")
    return value


def merchants(text: str) -> int:
    """Parse the number of merchants."""
    value = int(text)
    if value <= len(LOUD):
        raise argparse.ArgumentTypeError(
            f"{text}: at least {len(LOUD) + 1} are needed, {len(LOUD)} of them have parts"
        )
    return value


def terminate(signum: int, frame: FrameType | None) -> None:
    """Raise an exception, so that all processes are stopped."""
    raise SystemExit(128 + signum)


def main(argv: list[str] | None = None) -> int:
    """Run the example. Return 0 if celery-dq kept its promises or took no part, 1 if not, 2 for an error."""
    chosen = arguments(argv)
    signal.signal(signal.SIGTERM, terminate)
    started = time.monotonic()
    options = Options(chosen.seed, chosen.merchants, chosen.minutes, chosen.patience, chosen.out.resolve())
    brokers = [STOCK, DQ] if chosen.broker == "both" else [BROKERS[chosen.broker]]
    days: list[Day] = []
    trouble = 0
    try:
        with RedisServer(has_password=True) as ledger:
            for broker in brokers:
                days += [run_day(broker, options, ledger.url())]
    except (StageError, TimeoutError) as exc:
        print(f"example: {exc}", file=sys.stderr)
        trouble = 2
    except KeyboardInterrupt:
        print("example: stopped", file=sys.stderr)
        return 130
    if days:
        publish(days, options)
        print(f"{time.monotonic() - started:.0f} s in all")
    return trouble or int(any(not day.verdict.clean for day in days if day.broker is DQ))


def publish(days: list[Day], options: Options) -> None:
    """Print the table and save the picture, the page and the numbers."""
    print(report.text(days, options))
    numbers = options.out / "verdict.json"
    numbers.write_text(json.dumps(report.data(days, options), indent=2) + "\n", encoding="utf-8")
    for path in [*report.save(days, options), numbers]:
        print(path)


if __name__ == "__main__":
    sys.exit(main())
