"""Errors that a process survives, and that only its log shows.

A worker whose pool callback raises, or whose heartbeat thread continues after an exception, often ends with
the right result, because a second mechanism repairs the outcome. The suite therefore reads the log of each
process that it starts, and the records of the package in the test process itself. A test that provokes such
an error names it: ``@pytest.mark.logged_error("part of the log text")``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path

#: Texts that are faults wherever they stand in a log.
TEXTS = ("Pool callback raised", "continues after an error", "goes on after an error")

TRACEBACK = "Traceback (most recent call last):"

#: Lines from the end of one traceback to the head of the one that it is chained to.
MARGIN = 4

#: A frame of the package. The servers that tests start belong to `celery_dq.testing`, and are not meant.
_FRAME = re.compile(r'File "[^"]*/celery_dq/(?!testing/)')

#: The sentences between two tracebacks of one chain.
_CHAIN = re.compile(
    r"^(?:During handling of the above exception, another|The above exception was the direct)", re.M
)

#: A prefork pool raises this for a child that died, and logs with it the exception that it handles meanwhile:
#: the order to stop, or a lost connection.
_DEAD_CHILD = re.compile(r"^billiard\.exceptions\.WorkerLostError\b", re.M)

#: Celery logs a lost connection with its traceback, which is not a fault of the package.
_LOST_CONNECTION = re.compile(
    r"Connection to broker lost|Frequent restarts detected|Cannot connect to|Connection refused"
    r"|Couldn't (?:ack|reject) .*(?:Connection\w*|BrokenPipe|OS)Error"
)


def faults(text: str, *, ended: bool = True) -> tuple[list[str], str]:
    """The faults that a log shows.

    Args:
        text: whole lines of a log.
        ended: whether nothing follows; else a traceback at the end is held back, because it may go on.

    Returns:
        The faults, each traceback with the line before it, and the text that was held back.
    """
    found: list[str] = []
    lines = text.splitlines(keepends=True)
    number = 0
    while number < len(lines):
        if lines[number].strip().startswith(TRACEBACK):
            first, end = max(0, number - 1), _end_of_traceback(lines, number)
            if end >= len(lines) - MARGIN and not ended:
                return found, "".join(lines[first:])
            block = "".join(lines[first:end])
            if _is_of_the_package(block) and not _LOST_CONNECTION.search(lines[first]):
                found.append(block)
            number = end
            continue
        if any(each in lines[number] for each in TEXTS):
            found.append(lines[number])
        number += 1
    return found, ""


def _is_of_the_package(block: str) -> bool:
    """Whether a traceback of the chain has a frame of the package, and not only its context."""
    *_, last = _CHAIN.split(block)
    return bool(_FRAME.search(last if _DEAD_CHILD.search(last) else block))


def _end_of_traceback(lines: list[str], number: int) -> int:
    """The number of the line after a traceback that begins here, with those that it is chained to."""
    while True:
        number += 1
        while number < len(lines) and lines[number].startswith((" ", "\t")):
            number += 1
        number += 1
        chained = number + MARGIN - 1
        if not (chained < len(lines) and lines[chained].startswith(TRACEBACK)):
            return min(number, len(lines))
        number = chained


class LogWatch(logging.Handler):
    """Collects the faults of all processes that a test starts, and of the package in the test process."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._read: dict[Path, int] = {}
        self._held: dict[Path, str] = {}
        self._found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note a record of the package that carries an exception."""
        if record.exc_info and record.exc_info[0] is not None:
            self._found.append(f"{record.name}: {logging.Formatter().format(record)}")

    def watch(self, log: Path) -> None:
        """Read this file from now on, until it is dropped."""
        self._read.setdefault(log, 0)

    def drop(self, log: Path) -> None:
        """Read the rest of a file that is about to be removed."""
        if log in self._read:
            self._look(log, ended=True)
            self._read.pop(log)

    def collect(self) -> list[str]:
        """All faults since the last call."""
        for log in list(self._read):
            self._look(log, ended=False)
        found, self._found = self._found, []
        return found

    def _look(self, log: Path, *, ended: bool) -> None:
        try:
            with log.open("rb") as file:
                file.seek(self._read[log])
                fresh = file.read()
        except FileNotFoundError:
            fresh, ended = b"", True
        if not ended:
            fresh = fresh[: fresh.rfind(b"\n") + 1]
        self._read[log] += len(fresh)
        text = self._held.pop(log, "") + fresh.decode(errors="replace")
        found, held = faults(text, ended=ended)
        self._found += [f"{log.name}: {each}" for each in found]
        if held:
            self._held[log] = held


def unexpected(found: Iterable[str], expected: Iterable[str]) -> list[str]:
    """The faults that hold none of the expected texts."""
    texts = tuple(expected)
    return [each for each in found if not any(text in each for text in texts)]


#: The one watch of a test process; processes register their logs with it when they start.
WATCH = LogWatch()
