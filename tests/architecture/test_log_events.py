"""Each log record at INFO or above names its event, and the table of events is complete."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from docs._ext.log_events import EVENTS
from tests.architecture.parsing import parse

DOCS = Path(__file__).parents[2] / "docs"
PACKAGE = Path(__file__).parents[2] / "celery_dq"

#: Folders of the package whose log calls do not name their events yet.
NOT_YET: tuple[str, ...] = ()

#: Methods of a logger that write a record at INFO or above; `log` takes its level as an argument.
METHODS = frozenset({"info", "warning", "error", "critical", "exception", "log"})

#: :class:`celery_dq.outage.Outage` makes its two names from the name that its callers give.
OUTAGE = "outage.py"


class LogCall(NamedTuple):
    """A log call, or the making of an `Outage`.

    Attributes:
        line: line number in the file.
        events: names that its records carry; empty when the call has no literal name.
        is_info: whether its records have the level INFO.
    """

    line: int
    events: tuple[str, ...]
    is_info: bool = False


def log_calls(source: str) -> Iterator[LogCall]:
    """Find the log calls at INFO or above in the text of a module."""
    for node in ast.walk(parse(source)):
        if not isinstance(node, ast.Call):
            continue
        if _is_log_call(node.func):
            name = _event_of(node)
            is_info = isinstance(node.func, ast.Attribute) and node.func.attr == "info"
            yield LogCall(node.lineno, () if name is None else (name,), is_info)
        elif isinstance(node.func, ast.Name) and node.func.id == "Outage":
            name = _text_of(_argument(node, 1, "event"))
            yield LogCall(node.lineno, () if name is None else (f"{name}_began", f"{name}_over"))


def _is_log_call(function: ast.expr) -> bool:
    if not isinstance(function, ast.Attribute) or function.attr not in METHODS:
        return False
    owner = function.value
    name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
    return name.lower() in {"logging", "log", "_log"} or name.lower().endswith("logger")


def _event_of(call: ast.Call) -> str | None:
    extra = next((each.value for each in call.keywords if each.arg == "extra"), None)
    if not isinstance(extra, ast.Dict):
        return None
    for key, value in zip(extra.keys, extra.values, strict=True):
        if _text_of(key) == "event":
            return _text_of(value)
    return None


def _argument(call: ast.Call, place: int, name: str) -> ast.expr | None:
    if len(call.args) > place:
        return call.args[place]
    return next((each.value for each in call.keywords if each.arg == name), None)


def _text_of(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def calls_by_file() -> Iterator[tuple[str, LogCall]]:
    """Find the log calls of the package, each with the path of its file below the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name != OUTAGE:
            for call in log_calls(path.read_text(encoding="utf-8")):
                yield name, call


def test_each_log_call_names_an_event_of_the_table() -> None:
    calls = [(name, call) for name, call in calls_by_file() if name.partition("/")[0] not in NOT_YET]
    assert calls
    assert [f"{name}:{call.line}" for name, call in calls if not call.events] == []
    unlisted = {(event, name) for name, call in calls for event in call.events if event not in EVENTS}
    assert unlisted == set()


def test_each_event_of_the_table_is_logged() -> None:
    logged = {event for _, call in calls_by_file() for event in call.events}
    assert set(EVENTS) - logged == set()


def test_each_warning_has_a_remedy_in_the_guide() -> None:
    """A record without a level of its own (`log`) may be a warning."""
    guide = (DOCS / "guides" / "troubleshooting.rst").read_text()
    heads = {name for line in re.findall(r"^``.*", guide, re.M) for name in re.findall(r"``(\w+)``", line)}
    warnings = {event for _, call in calls_by_file() if not call.is_info for event in call.events}
    assert warnings - heads == set()
    assert heads <= set(EVENTS)


def test_event_names_are_snake_case_and_have_a_meaning() -> None:
    assert EVENTS
    assert [name for name in EVENTS if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)+", name)] == []
    assert [name for name, text in EVENTS.items() if not re.fullmatch(r"[A-Z`].*\.", text)] == []


def test_each_logger_has_the_name_that_this_test_looks_for_and_escapes_its_arguments() -> None:
    named = re.compile(r"^logger = shown_logger\(__name__\)$", re.M)
    other = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"get_?(task_)?[lL]ogger\b", named.sub("", path.read_text(encoding="utf-8")))
        or re.search(
            r"\blogging\.(debug|info|warning|error|exception|critical|log)\(",
            path.read_text(encoding="utf-8"),
        )
    }
    # The one that makes them, and the logger of kazoo's own lines.
    assert other == {"shown.py", "compat/kazoo_connection.py"}


@pytest.mark.parametrize(
    ("line", "events"),
    [
        ('logger.warning("x")', [()]),
        ('logger.info("x", extra={"worker": "w1"})', [()]),
        ('logger.info("x", extra={"event": name})', [()]),
        ('self._logger.exception("x", extra={"event": "a_b", "id": 1})', [("a_b",)]),
        ('logger.log(level, "x", extra={"event": "a_b"})', [("a_b",)]),
        ('logger.debug("x")', []),
        ('Outage(logger, "a_b")', [("a_b_began", "a_b_over")]),
        ('Outage(logger, event="a_b")', [("a_b_began", "a_b_over")]),
        ("Outage(logger, name)", [()]),
    ],
)
def test_a_log_call_without_a_literal_event_is_found(line: str, events: list[tuple[str, ...]]) -> None:
    assert [call.events for call in log_calls(line)] == events
