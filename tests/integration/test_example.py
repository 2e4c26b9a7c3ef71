"""The example project with a short day and real servers; ``make example`` runs the stock transport, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Seconds: each test starts six or more processes, on a machine that may be slow.
pytestmark = pytest.mark.timeout(300)


def run_example(line: str, out: Path) -> str:
    """Run a program of the example, and return its output."""
    run = subprocess.run(
        [sys.executable, *line.split(), "--out", str(out)],
        cwd=ROOT / "example_project",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr


def test_a_tiny_day_ends_with_a_verdict(tmp_path: Path) -> None:
    printed = run_example("run.py --broker dq --patience 60 --minutes 0.07 --merchants 50", tmp_path)
    verdict = json.loads((tmp_path / "verdict.json").read_text())["days"]["dq"]["verdict"]

    # Every notice is accounted for, and none was sent twice without a reason.
    assert verdict["published"] > 500
    assert verdict["delivered"] > 0.9 * verdict["published"]
    assert verdict["missing"] == 0
    ends = ("delivered", "given_up", "held", "queued", "lost")
    assert sum(verdict[end] for end in ends) == verdict["published"]
    assert verdict["duplicates_unexplained"] == 0
    # The hanging and the failing merchant cause retries.
    assert verdict["retries"] > 0
    assert "Dashboard of 'online' at http://127.0.0.1:" in printed
    assert (tmp_path / "day.png").stat().st_size > 10_000
    assert "<svg" in (tmp_path / "day.html").read_text(encoding="utf-8")


def test_a_ledger_is_right_when_its_leader_is_killed(tmp_path: Path) -> None:
    # A leader on a machine that stalls for a second or two keeps its term.
    run_example("ledger.py --postings 60 --workers 2 --kills 1 --stops 0 --session 6", tmp_path)
    verdict = json.loads((tmp_path / "ledger" / "verdict.json").read_text())
    assert verdict["posted"] == 60
    assert verdict["terms"] == 2
    assert verdict["clean"]
