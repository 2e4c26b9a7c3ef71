"""The program finds the differences between two brokers, and only those."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.celery_suite.__main__ import main
from tests.celery_suite.plugin import Outcome
from tests.celery_suite.verdict import Verdict

#: A suite of seven tests in the layout of Celery's.
SUITE = """
import os
import time

import pytest

OURS = os.environ["TEST_BROKER"].startswith("dq-redis://")


@pytest.mark.celery
def test_on_both(celery_app):
    assert celery_app.conf.broker_url == "memory://"


def test_scheduled():
    assert not OURS, "known"


def test_on_stock_only():
    assert not OURS, "a difference"


def test_the_other_way_round():
    assert OURS


def test_that_only_ours_takes_part_in():
    if not OURS:
        pytest.xfail("as Celery's suite does")
    assert not OURS


def test_that_hangs_the_process():
    if OURS:
        os._exit(1)


def test_after_the_hang():
    assert os.environ["REDIS_PORT"]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "t" / "integration").mkdir(parents=True)
    (folder / "celery").mkdir()
    (folder / "celery" / "__init__.py").write_text("__version__ = '0.1'\n")
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (folder / "t" / "integration" / "test_suite.py").write_text(SUITE)
    return folder


def test_the_verdict_names_the_differences(
    checkout: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = main(["--celery", str(checkout), "--out", str(tmp_path / "out"), "--again", "0"])
    printed, reported = capfd.readouterr()
    path = "t/integration/test_suite.py::"
    assert status == 1
    assert "suite of Celery 0.1" in reported
    assert "stock: 7 tests: 1 failed, 5 passed, 1 skipped" in printed
    assert "ours:  7 tests: 3 failed, 1 hung, 3 passed" in printed
    assert f"PASSES ON STOCK, FAILED ON OURS: {path}test_scheduled\n    known: " in printed
    assert f"PASSES ON STOCK, FAILED ON OURS: {path}test_on_stock_only\n" in printed
    assert "a difference" in printed
    assert f"PASSES ON STOCK, HUNG ON OURS: {path}test_that_hangs_the_process\n" in printed
    assert f"passes on ours, failed on stock: {path}test_the_other_way_round\n" in printed
    assert "2 tests pass on stock and not on ours" in printed


def test_a_difference_must_show_again() -> None:
    passed, failed = Outcome("passed", 1.0, ""), Outcome("failed", 1.0, "E  no")
    verdict = Verdict({"a": passed, "b": passed}, {"a": failed, "b": passed})
    assert verdict.faults == ["a"]
    assert verdict.after_another_run({"a": passed}, {"a": passed}).faults == []
    assert verdict.after_another_run({"a": failed}, {"a": failed}).faults == []
    assert verdict.after_another_run({"a": passed}, {"a": failed}).faults == ["a"]


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--celery", str(tmp_path)])
    assert "give a checkout of Celery" in capsys.readouterr().err
