"""Docstrings, comments and the architecture page refer to names and files that exist."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.parsing import parse

PACKAGE = Path(__file__).parents[2] / "celery_dq"
ROLE = re.compile(r":(meth|class|func|attr|data|exc):`~?([\w.]+)`")


def names_in(tree: ast.AST) -> Iterator[str]:
    """The names that a module defines or uses."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).rpartition(".")[2]


def unknown_references(sources: dict[str, str]) -> list[str]:
    """The roles of the package's own names of which a part is a name nowhere in these modules."""
    known = {name for source in sources.values() for name in names_in(parse(source))}
    known |= {*dir(builtins)} | {part for path in sources for part in path.removesuffix(".py").split("/")}
    return [
        f"{path}: {role[0]}"
        for path, source in sources.items()
        for role in ROLE.finditer(source)
        if role[2].partition(".")[0] not in {"celery", "kombu", "redis", "kazoo", "gevent", "billiard"}
        and not {part for part in role[2].split(".") if part} <= known
    ]


def test_every_reference_is_to_a_name_that_exists() -> None:
    sources = {str(path.relative_to(PACKAGE.parent)): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert sum(len(ROLE.findall(source)) for source in sources.values()) > 100
    assert unknown_references(sources) == []


def test_a_reference_to_a_name_that_is_gone_is_seen() -> None:
    text = "See :meth:`Heartbeat.absent`, :class:`celery_dq.wiring.Wires` and :func:`setup`."
    assert unknown_references({"celery_dq/wiring.py": f'"""{text}"""\n\ndef setup(): ...\n'}) == [
        "celery_dq/wiring.py: :meth:`Heartbeat.absent`",
        "celery_dq/wiring.py: :class:`celery_dq.wiring.Wires`",
    ]


#: A path or the name of a file of the package.
FILE = re.compile(r"[\w/]*\w\.(?:py|lua)\b")


def missing_files(text: str) -> list[str]:
    """The files that a text names and the package does not have, by the end of their path."""
    paths = [f"/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*") if path.suffix in (".py", ".lua")]
    return sorted(
        {name for name in FILE.findall(text) if not any(path.endswith(f"/{name}") for path in paths)}
    )


def test_the_architecture_page_names_files_that_exist() -> None:
    text = (PACKAGE.parent / "docs" / "architecture.rst").read_text()
    assert len(FILE.findall(text)) > 80
    assert missing_files(text) == []
    assert missing_files("``compat/prompt_stop.py`` and lua/push.lua") == ["compat/prompt_stop.py"]


def test_docstrings_name_files_that_exist() -> None:
    docstrings = "".join(
        each
        for path in PACKAGE.rglob("*.py")
        for each in re.findall(r'"""(.*?)"""', path.read_text(), re.DOTALL)
    )
    # Files of the user, and the placeholder of an include.
    assert missing_files(docstrings) == ["conftest.py", "include/name.lua", "manage.py"]
