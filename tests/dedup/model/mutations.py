"""Test the model: break one rule after the other in a copy, and report which faults the model finds.

``python -m tests.dedup.model.mutations`` has exit status 1 when a fault is not found. It tries nothing if the
text of a mutation is not exactly once in its file: the mutation would break nothing, or another place.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.dedup.model.broken_broker import BROKER
from tests.dedup.model.broken_coordinators import COORDINATORS, Mutation

ROOT = Path(__file__).resolve().parents[3]
MUTATIONS = [
    Mutation(kind, what, file, old, new)
    for broken in (COORDINATORS, BROKER)
    for (kind, file), rules in broken.items()
    for what, (old, new) in rules.items()
]


def misfits(mutations: Iterable[Mutation], package: Path = ROOT / "celery_dq") -> list[str]:
    """The mutations that would break nothing, or another place, each with the reason."""
    found = []
    for each in mutations:
        times = (package / each.file).read_text(encoding="utf-8").count(each.old)
        if times != 1 or each.old == each.new:
            found.append(f"{each.kind}: {each.what}: {each.file} has {times} times {each.old!r}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.dedup.model.mutations", description=__doc__)
    parser.add_argument("--examples", type=int, default=400, help="stories to find a mutation in")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", default="", help="only those of one implementation")
    parser.add_argument("--what", default="", help="only those with this text")
    chosen = parser.parse_args()
    unfit = misfits(MUTATIONS)
    if unfit:
        sys.exit("\n".join(["These mutations do not apply; mend their text:", *unfit]))
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "celery_dq", copy / "celery_dq", ignore=shutil.ignore_patterns("__pycache__"))
        (copy / "tests").symlink_to(ROOT / "tests")
        for each in MUTATIONS:
            if chosen.kind in each.kind and chosen.what in each.what:
                verdict = _judge(each, copy, chosen.examples, chosen.seed)
                missed += not verdict.startswith("caught")
                print(f"{each.kind:7} {each.what:55} {verdict}", flush=True)
    print(f"{missed} not caught")
    return 1 if missed else 0


def _judge(mutation: Mutation, copy: Path, examples: int, seed: int) -> str:
    file = copy / "celery_dq" / mutation.file
    source = file.read_text(encoding="utf-8")
    file.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")
    words = ("--first", "--kind", mutation.kind, "--examples", str(examples), "--seed", str(seed))
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "tests.dedup.model", *words],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        file.write_text(source, encoding="utf-8")
    if ran.returncode == 0:
        return "NOT CAUGHT"
    errors = [line.strip(" |+-") for line in ran.stderr.splitlines() if "Error" in line and "rror:" in line]
    return f"caught: {errors[0][:80] if errors else 'AssertionError'}"


if __name__ == "__main__":
    sys.exit(main())
