"""A pytest plugin for the process that runs Celery's suite: it sets up each app and records each outcome.

The record is a file of JSON lines, written during the tests, because a suite that hangs is killed. A test
with a line in it is not run again, so the same command continues after a hang.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from celery_dq.wiring import equip_every_app

OPTION = "--record-outcomes"
#: Marks in the record for a test that has begun, and for a run that came to its end.
STARTED, ENDED = "started", "ended"
#: The outcome of a test is the last of these that its setup, call or teardown has. An expected failure is
#: "skipped".
OUTCOMES = ("passed", "skipped", "failed", "hung")


class Outcome(NamedTuple):
    outcome: str
    seconds: float
    text: str


def read_outcomes(record: Path) -> dict[str, Outcome]:
    """Return the outcome of each test in the record; a test without its teardown has hung."""
    outcomes: dict[str, Outcome] = {}
    phases: list[Outcome] = []
    for entry in _entries(record):
        if entry["outcome"] == ENDED:
            continue
        if entry["outcome"] == STARTED:
            outcomes[entry["test"]] = Outcome("hung", 0.0, "The test did not end.")
            continue
        if entry["when"] == "setup":
            phases = []
        phases.append(Outcome(entry["outcome"], entry["seconds"], entry["text"]))
        if entry["when"] == "teardown":
            names, seconds, texts = zip(*phases, strict=True)
            outcomes[entry["test"]] = Outcome(max(names, key=OUTCOMES.index), sum(seconds), "".join(texts))
    return outcomes


def has_ended(record: Path) -> bool:
    entries = _entries(record)
    return bool(entries) and entries[-1]["outcome"] == ENDED


def _entries(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


class Recorder:
    """Writes outcomes to the record, and runs only the tests that are not in it."""

    def __init__(self, record: Path) -> None:
        self._record = record

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Drop the tests that have run already."""
        done = read_outcomes(self._record)
        items[:] = [item for item in items if item.nodeid not in done]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(test=nodeid, outcome=STARTED)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a phase of a test. Repeated attempts ("rerun") do not count."""
        if report.outcome in OUTCOMES:
            text = report.longreprtext[-4000:] if report.failed else ""
            how = {"outcome": report.outcome, "seconds": report.duration, "text": text}
            self._write(test=report.nodeid, when=report.when, **how)

    def pytest_sessionfinish(self) -> None:
        self._write(outcome=ENDED)

    def _write(self, **entry: Any) -> None:
        with self._record.open("a") as lines:
            lines.write(json.dumps(entry) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=Path, required=True, help="the file of JSON lines")


def pytest_configure(config: pytest.Config) -> None:
    """Set up every app that uses a broker of celery-dq, as the ``celery`` command does."""
    equip_every_app()
    config.pluginmanager.register(Recorder(config.getoption(OPTION)))
