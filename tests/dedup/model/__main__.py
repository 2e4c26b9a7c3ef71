"""The long version of ``tests/dedup/test_model.py``."""

from __future__ import annotations

import argparse
import time

from celery_dq.testing.servers import RedisServer
from tests.dedup.model.stories import KINDS, run_stories


def main() -> None:
    """Run stories. A failure is shown in its shortest form, with the exit status 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.dedup.model", description=__doc__)
    parser.add_argument("--examples", type=int, default=2000, help="stories of each kind")
    parser.add_argument("--steps", type=int, default=40, help="most steps of a story")
    parser.add_argument("--seed", type=int, default=None, help="repeats a run")
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: all of them")
    parser.add_argument("--first", action="store_true", help="show the first failure as it is: faster")
    chosen = parser.parse_args()
    with RedisServer() as server:
        for kind in chosen.kind or KINDS:
            began = time.monotonic()
            reported = run_stories(
                kind,
                server.url(1),
                examples=chosen.examples,
                steps=chosen.steps,
                seed=chosen.seed,
                shorten=not chosen.first,
            )
            print(
                f"{kind}: {reported} stories, {time.monotonic() - began:.1f} s, no promise broken", flush=True
            )


if __name__ == "__main__":
    main()
