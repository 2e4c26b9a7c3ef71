"""Break one place after the other in a copy, and report which breaks the tests see.

``python -m tests.mutations`` runs all of the table, ``--promise once`` those of one promise, ``--what lease``
those whose description holds this. ``--seed 7 --count 120`` makes mistakes at random places
(``mistakes.py``), the same number in each area or in those of ``--area``, and prints the share that the tests
of each area see. A mutation whose tests hang counts as seen only if the same tests pass in time on the
unbroken copy; with ``--baseline`` the same holds for tests that fail. The exit status is 1 if a mutation was
not seen.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tests.mutations.mistakes import AREAS, Mistake, choose
from tests.mutations.mutation import PROMISES, ROOT, Mutation, misfits
from tests.mutations.table import MUTATIONS

SEEN, MISSED = "seen", "NOT SEEN"

#: The exit status of pytest when tests failed, and no other error occurred.
TESTS_FAILED = 1
#: The fault of a mutation whose tests fail on the unbroken copy, by the exit status of pytest.
WITHOUT = {TESTS_FAILED: "fails without the mutation", None: "does not end in time without the mutation"}


def main() -> int:
    """Run the chosen mutations; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--promise", choices=sorted(PROMISES), help="only those of this promise")
    parser.add_argument("--what", default="", help="only those whose description holds this")
    parser.add_argument("--jobs", type=int, default=1, help="mutations tried at a time")
    parser.add_argument("--seconds", type=int, default=120, help="after which a run counts as hung")
    parser.add_argument("--baseline", action="store_true", help="run failing tests without the mutation, too")
    parser.add_argument("--seed", type=int, help="make mistakes at random places, the same for the same seed")
    parser.add_argument("--count", type=int, default=120, help="mistakes to make")
    parser.add_argument(
        "--area", action="append", choices=sorted(AREAS), default=[], help="where to make mistakes"
    )
    options = parser.parse_args()
    if options.seed is not None:
        return _judge(choose(options.seed, options.count, options.area), options)
    chosen = [
        each for each in MUTATIONS if options.what in each.what and options.promise in (None, each.promise)
    ]
    if unfit := misfits(chosen):
        sys.exit("\n".join(["These mutations do not fit the code:", *unfit]))
    return _judge(chosen, options)


def _judge(chosen: Sequence[Mutation | Mistake], options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="dq-mutations-") as folder:
        copies = [_copy(Path(folder) / str(number)) for number in range(options.jobs)]
        judge = Judge(partial(_pytest, seconds=options.seconds), options.baseline)
        missed = _run_all(copies, chosen, judge)
    totals, unseen = Counter(each.promise for each in chosen), Counter(each.promise for each in missed)
    for name, total in totals.items():
        print(f"{name:11} {total - unseen[name]} of {total} seen ({1 - unseen[name] / total:.0%})")
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutations seen")
    return 1 if missed else 0


def _copy(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache")
    for name in ("celery_dq", "tests", "benchmarks", "docs", "example_project"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("setup.cfg", "pyproject.toml", "README.rst", "CHANGELOG.rst", "CONTRIBUTING.rst"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def _run_all(
    copies: Sequence[Path], chosen: Sequence[Mutation | Mistake], judge: Judge
) -> list[Mutation | Mistake]:
    waiting: queue.SimpleQueue[Mutation | Mistake] = queue.SimpleQueue()
    for each in chosen:
        waiting.put(each)
    missed: list[Mutation | Mistake] = []

    def work(copy: Path) -> None:
        while True:
            try:
                each = waiting.get_nowait()
            except queue.Empty:
                return
            began = time.monotonic()
            verdict = judge.verdict(copy, each)
            took = f"({time.monotonic() - began:.0f} s)"
            print(f"{each.promise:11} {each.what:70} {verdict} {took}", flush=True)
            if not verdict.startswith(SEEN):
                missed.append(each)

    threads = [threading.Thread(target=work, args=(copy,)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return missed


class Judge:
    """Finds out whether tests see mutations.

    Args:
        run: Runs tests in a copy; returns the status of pytest, or None if it did not end in time.
        strict: Whether tests that fail are run without the mutation as well as tests that hang.
    """

    def __init__(self, run: Callable[[Path, tuple[str, ...]], int | None], strict: bool) -> None:
        self._run = run
        self._strict = strict
        #: The status of pytest on an unbroken copy, by its arguments.
        self._unbroken: dict[tuple[str, ...], int | None] = {}

    def verdict(self, copy: Path, mutation: Mutation | Mistake) -> str:
        """Apply the mutation to the copy, run its tests, and undo it."""
        file = copy / "celery_dq" / mutation.file
        source = file.read_text(encoding="utf-8")
        file.write_text(mutation.apply(source), encoding="utf-8")
        try:
            status, tests = self._first_failure(copy, mutation.runs)
        finally:
            file.write_text(source, encoding="utf-8")
        if status not in WITHOUT:
            return MISSED if status == 0 else f"{MISSED}: pytest ended with {status}"
        if (self._strict or status is None) and (unbroken := self._baseline(copy, tests)) != 0:
            return f"{MISSED}: {WITHOUT.get(unbroken, f'pytest ends with {unbroken} without the mutation')}"
        return SEEN if status == TESTS_FAILED else f"{SEEN}: hung"

    def _first_failure(
        self, copy: Path, runs: Sequence[tuple[str, ...]]
    ) -> tuple[int | None, tuple[str, ...]]:
        """Run tests until a run fails; return the status of the last run, and its arguments."""
        for tests in runs[:-1]:
            if (status := self._run(copy, tests)) in WITHOUT:
                return status, tests
        return self._run(copy, runs[-1]), runs[-1]

    def _baseline(self, copy: Path, tests: tuple[str, ...]) -> int | None:
        if tests not in self._unbroken:
            self._unbroken[tests] = self._run(copy, tests)
        return self._unbroken[tests]


def _pytest(copy: Path, tests: Sequence[str], seconds: int) -> int | None:
    """The exit status of pytest; None if it did not end in time."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        command,
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        # SIGINT lets fixtures stop the servers that they have started.
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None


if __name__ == "__main__":
    sys.exit(main())
