"""Mistakes at random places of the package, as a tired programmer makes them.

A comparison is turned, a bound is off by one, a unit is wrong by a thousand, two arguments are swapped, a
statement is missing, a condition is negated, a key is another one. Python is read by its syntax tree, and Lua
by its tokens. Logs, errors, docstrings and annotations are left out, because only people read them.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterable
from functools import cache
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

from tests.mutations.mutation import ROOT

PACKAGE = ROOT / "celery_dq"
#: Files of tests that are run before all others of an area.
MOST_LIKELY = 8


class Area(NamedTuple):
    """A part of the package, and the tests that should see mistakes in it.

    Attributes:
        paths: Folders or files, relative to the package. A file belongs to the area with its longest path.
        tests: Arguments of pytest.
    """

    paths: tuple[str, ...]
    tests: tuple[str, ...]


AREAS = {
    "lua": Area(("transport/redis/lua",), ("tests/lua", "tests/properties")),
    "transport": Area(
        (
            "transport",
            "scripts",
            "testing",
            "native.py",
            "daemon_threads.py",
            "waker.py",
            "wake_flag.py",
            "outage.py",
            "hash_slots.py",
        ),
        ("tests/broker", "tests/conformance", "tests/cluster", "-k", "not zookeeper and not stock"),
    ),
    "worker": Area(
        ("worker", "compat", "lost_attempts.py", "tracing", "wiring.py", "context.py"),
        ("tests/broker", "tests/dedup", "tests/singleton"),
    ),
    "publishing": Area(("app", "producer", "private_files.py"), ("tests/producer", "tests/unit")),
    "dedup": Area(("dedup", "other_brokers"), ("tests/dedup", "tests/singleton", "tests/unit")),
    "leaders": Area(
        ("leadership", "singleton", "allocation", "beat"),
        ("tests/leadership", "tests/allocation", "tests/beat", "tests/singleton"),
    ),
    "zookeeper": Area(
        (
            "zookeeper",
            "transport/zookeeper",
            "transport/fetcher.py",
            "curator",
            "compat/kazoo_connection.py",
            "znodes.py",
        ),
        ("tests/zookeeper", "tests/zookeeper_transport", "tests/curator"),
    ),
    "operating": Area(
        (
            "app/api",
            "app/checks",
            "inspector",
            "cli",
            "metrics",
            "contrib",
            "migration",
            "probe.py",
            "worker/start_checks.py",
            "testing/apps.py",
            "testing/pytest.py",
        ),
        ("tests/integration", "tests/dashboard", "tests/metrics", "tests/migration", "tests/outbox"),
    ),
    "words": Area(
        (".", "options", "transport/message_record.py", "transport/tenant.py"), ("tests/unit", "tests/lua")
    ),
}


class Mistake(NamedTuple):
    """One mistake.

    Attributes:
        promise: Name of its area.
        what: The kind of mistake and its place.
        file: The file, relative to the package.
        start: Offset of the replaced text in the file.
        end: Offset behind it.
        new: The text in its place.
        tests: Arguments of pytest.
        likely: Files among these tests that name what the mistake is in, the likeliest first.
    """

    promise: str
    what: str
    file: str
    start: int
    end: int
    new: str
    tests: tuple[str, ...]
    likely: tuple[str, ...] = ()

    @property
    def runs(self) -> list[tuple[str, ...]]:
        """Arguments of pytest for the runs of the tests: the likely ones, and all."""
        options = tuple(dropwhile(lambda each: not each.startswith("-"), self.tests))
        return [(*self.likely, *options), self.tests] if self.likely else [self.tests]

    def apply(self, source: str) -> str:
        """Return the source of the file with the mistake."""
        return source[: self.start] + self.new + source[self.end :]


class Edit(NamedTuple):
    """A possible edit of a source text: its kind, the place, and the new text."""

    kind: str
    start: int
    end: int
    new: str


def choose(seed: int, count: int, areas: Iterable[str] = ()) -> list[Mistake]:
    """Choose mistakes, the same number in each area, each kind and file as often as another.

    Args:
        seed: The same seed chooses the same mistakes in the same code.
        count: Number of mistakes.
        areas: Names of areas; default all.
    """
    generator = random.Random(seed)
    names = list(areas) or list(AREAS)
    modules = sorted(each for each in PACKAGE.rglob("*") if each.suffix in {".py", ".lua"})
    chosen: list[Mistake] = []
    for number, name in enumerate(names):
        area = AREAS[name]
        files = [file for file in modules if area_of(file) == name]
        edits = {file: edits_of(file) for file in files}
        for _ in range((count + number) // len(names)):
            file = generator.choices(files, [len(edits[each]) ** 0.5 for each in files])[0]
            kinds = sorted({each.kind for each in edits[file]})
            kind = generator.choice(kinds)
            edit = generator.choice([each for each in edits[file] if each.kind == kind])
            edits[file].remove(edit)
            chosen.append(_mistake(name, area, file, edit))
    return chosen


def edits_of(file: Path) -> list[Edit]:
    """Return the possible edits of a file."""
    source = file.read_text(encoding="utf-8")
    return lua_edits(source) if file.suffix == ".lua" else python_edits(source)


def area_of(file: Path) -> str:
    """Return the name of the area that a file of the package belongs to."""
    parents = {str(each) for each in (file.relative_to(PACKAGE), *file.relative_to(PACKAGE).parents)}
    paths = [(len(path), name) for name, area in AREAS.items() for path in area.paths if path in parents]
    return max(paths)[1]


def _mistake(name: str, area: Area, file: Path, edit: Edit) -> Mistake:
    source = file.read_text(encoding="utf-8")
    line = source.count("\n", 0, edit.start) + 1
    old = " ".join(source[edit.start : edit.end].split())
    place = str(file.relative_to(PACKAGE))
    what = f"{edit.kind}: {place}:{line}: {old[:40]} -> {' '.join(edit.new.split())[:40]}"
    likely = likely_tests(area.tests, {file.stem, *names_around(source, edit.start)})
    return Mistake(name, what, place, edit.start, edit.end, edit.new, area.tests, likely)


def names_around(source: str, start: int) -> list[str]:
    """Return the names of the function and of the class, if any, of a place in a source."""
    before = source[:start]
    found = [
        re.findall(pattern, before)
        for pattern in (r"\bdef (\w+)", r"\bclass (\w+)", r"function [\w.]*?(\w+)\(")
    ]
    return [names[-1] for names in found if names]


def likely_tests(tests: tuple[str, ...], names: set[str]) -> tuple[str, ...]:
    """Return the files among these tests that name most of these names, rare ones first of all."""
    words = _words_of(tests)
    uses = {name: sum(name in found for found in words.values()) for name in names}
    weights = {file: sum(1 / uses[name] for name in names & found) for file, found in words.items()}
    likely = sorted((file for file in weights if weights[file]), key=lambda file: (-weights[file], file))
    return tuple(likely[:MOST_LIKELY])


@cache
def _words_of(tests: tuple[str, ...]) -> dict[str, set[str]]:
    folders = [ROOT / each for each in tests if each.startswith("tests/")]
    files = [file for folder in folders for file in sorted(folder.rglob("test_*.py"))]
    return {str(file.relative_to(ROOT)): set(re.findall(r"\w+", file.read_text("utf-8"))) for file in files}


# -- Python

_TURNED = {ast.Lt: (">", "<="), ast.LtE: (">=", "<"), ast.Gt: ("<", ">="), ast.GtE: ("<=", ">")}
_OTHER = {ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"}
#: Ends of the names of values with a unit.
_UNITS = ("_s", "_ms", "_us")
#: Calls whose arguments are read by people only, or whose absence only costs time.
_FOR_PEOPLE = {"logger", "logging", "warnings", "click", "began", "over", "cast", "debug", "info", "warning"}


def python_edits(source: str) -> list[Edit]:
    """Return the possible edits of a Python source."""
    return list(_PythonEdits(source).edits)


class _PythonEdits(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self._source = source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._bytes = source.isascii()
        self.edits: list[Edit] = []
        tree = ast.parse(source)
        for statement in tree.body:
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                self.visit(statement)

    def _offset(self, line: int, column: int) -> int:
        start = self._lines[line - 1]
        if not self._bytes:
            text = self._source[start : self._lines[line]]
            column = len(text.encode()[:column].decode())
        return start + column

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._source[start:end]

    def _add(self, kind: str, start: int, end: int, new: str) -> None:
        self.edits.append(Edit(kind, start, end, new))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Visit the body only; a text for people is left out."""
        if node.name in {"__repr__", "__str__"}:
            return
        for statement in node.body:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Visit the methods only."""
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                self.visit(statement)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave the texts of errors out."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Visit the value only."""
        if node.value is not None:
            self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Turn a comparison, or move its bound by one."""
        self.generic_visit(node)
        if len(node.ops) != 1:
            return
        start, end = self._span(node.left)[1], self._span(node.comparators[0])[0]
        if ")" in self._source[start:end] or "(" in self._source[start:end]:
            return
        operator = type(node.ops[0])
        if operator in _TURNED:
            turned, moved = _TURNED[operator]
            self._add("turned comparison", start, end, f" {turned} ")
            self._add("bound off by one", start, end, f" {moved} ")
        elif operator in _OTHER:
            self._add("turned comparison", start, end, f" {_OTHER[operator]} ")

    def visit_If(self, node: ast.If) -> None:
        """Negate the condition."""
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Negate the condition."""
        self._negate(node.test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        start, end = self._span(test)
        if not isinstance(test, ast.NamedExpr):
            self._add("negated condition", start, end, f"(not ({self._source[start:end]}))")

    def visit_Expr(self, node: ast.Expr) -> None:
        """Drop a call."""
        if isinstance(node.value, ast.Call) and not self._is_for_people(node.value):
            self._add("dropped statement", *self._span(node), "pass")
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Drop an assignment to an attribute, or give it the wrong unit."""
        target = node.targets[0]
        if isinstance(target, ast.Attribute):
            self._add("dropped statement", *self._span(node), "pass")
        self._scale(getattr(target, "attr", getattr(target, "id", "")), node.value)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Drop the statement."""
        self._add("dropped statement", *self._span(node), "pass")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Swap two arguments, or give one the wrong unit."""
        if self._is_for_people(node):
            return
        names = [each for each in node.args[:2] if isinstance(each, ast.Name | ast.Attribute)]
        ordered = isinstance(node.func, ast.Name) and node.func.id in {"isinstance", "max", "min", "zip"}
        if len(names) == 2 and not ordered and self._text(names[0]) != self._text(names[1]):
            start, end = self._span(names[0])[0], self._span(names[1])[1]
            self._add("swapped arguments", start, end, f"{self._text(names[1])}, {self._text(names[0])}")
        for keyword in node.keywords:
            self._scale(keyword.arg or "", keyword.value)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Take the next key of the same partition."""
        self.generic_visit(node)
        if (
            isinstance(node.value, (ast.Name, ast.Attribute))
            and self._text(node.value).split(".")[-1] == "keys"
        ):
            keys = [each for each in _key_names() if each != node.attr]
            if node.attr in _key_names():
                other = keys[len(node.attr) % len(keys)]
                self._add("wrong key", *self._span(node), f"{self._text(node.value)}.{other}")

    def visit_Constant(self, node: ast.Constant) -> None:
        """Move a number by one."""
        if isinstance(node.value, int) and not isinstance(node.value, bool) and 1 < node.value < 1000:
            self._add("bound off by one", *self._span(node), str(node.value + 1))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave formatted texts out."""

    def _scale(self, name: str, value: ast.expr) -> None:
        if name.endswith(_UNITS) and not isinstance(value, ast.Constant):
            start, end = self._span(value)
            self._add("wrong unit", start, end, f"1000 * ({self._source[start:end]})")

    def _is_for_people(self, call: ast.Call) -> bool:
        return bool(_FOR_PEOPLE & set(re.findall(r"\w+", self._text(call.func))))


@cache
def _key_names() -> list[str]:
    source = (PACKAGE / "keys.py").read_text(encoding="utf-8")
    return re.findall(r"    (?:def (?=\w+\(self\) -> str:)|(?=\w+ = _Key))(\w+)", source)


# -- Lua

_LUA_STRING_OR_COMMENT = re.compile(r"--[^\n]*|'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"")
#: A pattern, the kind of mistake, and the new text of its first group.
_LUA: tuple[tuple[str, str, Callable[[str], str]], ...] = (
    (r"(?<=\s)(<|>|<=|>=)(?=\s)", "turned comparison", lambda old: {"<": ">", ">": "<"}[old[0]] + old[1:]),
    (r"(?<=\s)(<|>|<=|>=)(?=\s)", "bound off by one", lambda old: old[0] if old[1:] else old + "="),
    (r"(?<=\s)(==|~=)(?=\s)", "turned comparison", lambda old: {"==": "~=", "~=": "=="}[old]),
    (r"(?<=\s)(and|or)(?=\s)", "negated condition", lambda old: {"and": "or", "or": "and"}[old]),
    (r"\b(not )(?=\w)", "negated condition", lambda old: ""),
    (r"(?<=[\s(,])(\d{1,3})(?=[\s),])", "bound off by one", lambda old: str(int(old) + 1)),
    (r"\b(1000|1000000|60000000)\b", "wrong unit", lambda old: old + "000"),
    (r"(?m)^ *(call\('[A-Z]+', .*\))$", "dropped statement", lambda old: ""),
    (r"(?m)^ *((?:state\.)?\w+ = .*)$", "dropped statement", lambda old: ""),
    (r"\b(?:if|elseif) ([^\n]*) then\b", "negated condition", lambda old: f"not ({old})"),
    (r"\w\((\w+, \w+)\)", "swapped arguments", lambda old: ", ".join(reversed(old.split(", ")))),
)
_LUA_KEY = re.compile(r"P \.\. ('\w+')")


def lua_edits(source: str) -> list[Edit]:
    """Return the possible edits of a Lua source."""
    hidden = _LUA_STRING_OR_COMMENT.sub(_hide, source)
    comments = [(each.start(), each.end()) for each in re.finditer(r"--[^\n]*", source)]
    edits: list[Edit] = []
    for pattern, kind, new in _LUA:
        for found in re.finditer(pattern, hidden):
            start, end = found.span(1)
            old = source[start:end]
            if not any(first <= start < last for first, last in comments) and new(old) != old:
                edits.append(Edit(kind, start, end, new(old)))
    keys = sorted({each.group(1) for each in _LUA_KEY.finditer(source)})
    for found in _LUA_KEY.finditer(source):
        others = [each for each in keys if each != found.group(1)]
        if others and not any(first <= found.start() < last for first, last in comments):
            edits.append(Edit("wrong key", *found.span(1), others[found.start() % len(others)]))
    return edits


def _hide(found: re.Match[str]) -> str:
    """Return a text of the same length in which nothing but a command's name can be found."""
    text = found.group()
    if re.fullmatch(r"'[A-Z]+'", text):
        return text
    return "\x00" * len(text) if text.startswith("--") else f"'{'_' * (len(text) - 2)}'"
