"""The progress of a command that takes long, on a terminal and in a pipe."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr

import pytest

from celery_dq.cli import bulk
from celery_dq.cli.bulk import reported_progress


class Stderr(io.StringIO):
    """Stderr, as a terminal or as a pipe."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.fixture(params=["bar", "line", "pipe"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of progress."""
    monkeypatch.setattr(bulk, "_STEP_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    if request.param == "line":
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    return str(request.param)


def shown(kind: str, counts: list[int], total: int = 0, error: BaseException | None = None) -> str:
    """Report counts, raise the error, and return the text on stderr."""
    with redirect_stderr(Stderr(kind != "pipe")) as stderr:
        try:
            with reported_progress(False, "migrated", "message", total) as on_progress:
                for count in counts:
                    on_progress(count)
                if error is not None:
                    raise error
        except (SystemExit, ValueError) as exc:
            stderr.write(repr(exc))
    return stderr.getvalue()


def test_a_terminal_shows_a_bar_or_a_count_and_a_pipe_nothing(kind: str) -> None:
    text = shown(kind, [1200, 2001], 2000)  # one more has come meanwhile
    assert ("1,200 of 2,000 migrated" in text, "━" in text) == (kind != "pipe", kind == "bar")
    assert bool(text) == (kind != "pipe")


def test_without_a_known_total_it_counts(kind: str) -> None:
    assert ("7 migrated" in shown(kind, [7])) == (kind != "pipe")


def test_an_interruption_ends_the_bar_and_reports_the_count(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(kind, [3], 9, KeyboardInterrupt())
    assert capsys.readouterr().out == "Interrupted: at least 3 messages of 9 migrated.\n"
    assert text.endswith("SystemExit(130)")
    if kind == "bar":
        assert "\x1b[2K" in text  # the line of the bar is erased


def test_an_error_reports_the_count(kind: str) -> None:
    text = shown(kind, [3], error=ValueError("broken"))
    assert "At least 3 messages migrated before this error:\nValueError('broken')" in text
