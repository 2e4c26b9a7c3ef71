"""The rules of the house that a machine can check."""

from __future__ import annotations

import ast
import configparser
import importlib
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

import celery_dq
from celery_dq.errors import DQError
from celery_dq.options.sections import SETTINGS
from tests.architecture.parsing import parse

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "celery_dq"
MODULES = sorted(PACKAGE.rglob("*.py"))
#: A class above either may have two jobs; the report of a run lists it.
MAX_CLASS_LINES, MAX_CLASS_METHODS = 250, 20

# Pure: they decide and compute, and know no library. Each must stand in the contract once it exists.
PURE = (
    *("errors", "clock", "duration", "hash_slots", "keys", "lost_attempts", "znodes", "context"),
    *("per_process", "waker", "protocols", "options", "transport.resource_set"),
    *("transport.tenant", "transport.message_record", "transport.partition_replies"),
    *("transport.partition_store", "transport.redis.store.home", "dedup.machine", "dedup.key"),
    *("leadership.career", "allocation.assignment", "curator.framing", "curator.names"),
    *("producer.buffer", "producer.segment"),
)


def every_error(base: type[DQError] = DQError) -> Iterator[type[DQError]]:
    yield base
    for error in base.__subclasses__():
        yield from every_error(error)


def fresh_python(program: str) -> str:
    """Return the output of `program` in a process that has imported nothing yet."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_imports_keep_the_contracts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import importlinter.cli as cli; cli.lint_imports_command()", "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_pure_module_stands_in_the_contract() -> None:
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / "setup.cfg")
    listed = contracts["importlinter:contract:words"]["source_modules"].split()
    built = [
        f"celery_dq.{name}"
        for name in PURE
        if (PACKAGE / f"{name.replace('.', '/')}.py").exists() or (PACKAGE / name.replace(".", "/")).is_dir()
    ]
    assert sorted(listed) == sorted(built)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_obeys_the_rules(path: Path, record_property: Callable[[str, object], None]) -> None:
    text = path.read_text()
    assert path.stem not in {"utils", "common", "helpers"}
    for node in ast.walk(parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        assert "celery_dq" not in names, f"line {getattr(node, 'lineno', 0)} imports the package root"
        if isinstance(node, ast.ClassDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            methods = sum(isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) for member in node.body)
            if lines > MAX_CLASS_LINES or methods > MAX_CLASS_METHODS:
                record_property(
                    "large class", f"{path.relative_to(ROOT)}: {node.name}, {lines} lines, {methods} methods"
                )


#: Calls that belong to one module each: state of one process, wake-ups of an event loop, and threads.
SHARED_PARTS = {
    "os.getpid() ==": "per_process",
    "socket.socketpair": "waker",
    "os.pipe": "waker",
    "threading.Thread": "daemon_threads",
}


def hand_made(tree: ast.Module) -> set[str]:
    """The keys of SHARED_PARTS that a module does by itself."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and "os.getpid()" in map(
            ast.unparse, [node.left, *node.comparators]
        ):
            found.add("os.getpid() ==")
        elif isinstance(node, ast.Call):
            found.add(ast.unparse(node.func))
    return found & {*SHARED_PARTS}


def test_shared_parts_are_made_in_one_module() -> None:
    made = {(part, path.stem) for path in MODULES for part in hand_made(ast.parse(path.read_text()))}
    assert made <= {*SHARED_PARTS.items()}
    assert hand_made(
        ast.parse("if pid != os.getpid(): pair = socket.socketpair(); os.pipe(); threading.Thread()")
    ) == {*SHARED_PARTS}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.Module, names: Collection[str]) -> set[str]:
    """The modules of the package that a module imports anywhere, for type checkers only included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{each.name}" for each in node.names}
            found |= {each if each in names else node.module for each in inner}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found & {*names}


def cycles_in(imports: dict[str, set[str]]) -> list[str]:
    """The modules that import themselves through others."""

    def reached_from(name: str) -> set[str]:
        found: set[str] = set()
        ahead = list(imports[name])
        while ahead:
            each = ahead.pop()
            if each not in found:
                found.add(each)
                ahead += imports[each]
        return found

    return [name for name in imports if name in reached_from(name)]


def test_no_module_imports_itself_through_others() -> None:
    paths = {module_name(path): path for path in MODULES}
    imports = {name: imports_of(parse(path.read_text()), paths) - {name} for name, path in paths.items()}
    assert cycles_in(imports) == []
    # The check sees one, at any distance.
    store = "celery_dq.transport.message_record"
    assert store in cycles_in({**imports, "celery_dq.errors": {"celery_dq.transport.redis.transport"}})


def test_a_public_name_that_is_the_name_of_a_package_is_not_hidden_by_it() -> None:
    packages = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    same = packages & set(celery_dq.__all__)
    assert same == {"dedup"}
    assert all(callable(importlib.import_module(f"celery_dq.{name}")) for name in same)


def test_every_public_name_whose_room_is_built_is_there() -> None:
    for name, home in celery_dq._HOMES.items():
        path = ROOT / home.replace(".", "/")
        if path.is_dir() or path.with_suffix(".py").exists():
            assert getattr(celery_dq, name) is not None


def imported_at_run_time(tree: ast.AST) -> Iterator[str]:
    """The first names of the modules that a file imports when it runs, other than for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).partition(".")[0]
        yield from imported_at_run_time(node)


def test_only_modules_of_the_oldest_redis_py_are_loaded() -> None:
    known = {
        f"redis.{name}"
        for name in ("asyncio", "backoff", "client", "connection", "exceptions", "retry", "sentinel")
    }
    strange = {
        (str(path.relative_to(PACKAGE)), node.module)
        for path in MODULES
        for node in parse(path.read_text()).body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("redis.")
    }
    assert {module for _, module in strange} <= known, strange


def test_only_installed_packages_are_imported() -> None:
    # Celery with its requirements; the extras; the requirements of one report; PyYAML, without which the same
    # file can be JSON; and pytest, which imports its fixtures itself.
    brought = {
        *("billiard", "celery", "click", "django", "kazoo", "kombu", "matplotlib", "pytest", "redis", "vine"),
        "opentelemetry",
        "prometheus_client",
        "rich",
        "waitress",
        "yaml",
    }
    known = {"celery_dq", *sys.stdlib_module_names, *brought}
    strange = {
        (str(path.relative_to(PACKAGE)), name)
        for path in MODULES
        for name in imported_at_run_time(parse(path.read_text()))
        if name not in known
    }
    assert strange == set()


def test_every_error_survives_pickling() -> None:
    for error in every_error():
        copy = pickle.loads(pickle.dumps(error("dq_lease = 3 is too small")))
        assert type(copy) is error
        assert str(copy) == "dq_lease = 3 is too small"


def test_importing_the_package_imports_no_library() -> None:
    program = (
        "import sys, __future__; before = set(sys.modules); import celery_dq\n"
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    assert fresh_python(program) == "['celery_dq']"


def test_an_error_class_costs_no_library() -> None:
    program = (
        "import sys; from celery_dq import DQError, Quota\n"
        "print(sorted({'celery', 'kombu', 'redis', 'kazoo', 'django'} & set(sys.modules)))"
    )
    assert fresh_python(program) == "[]"


@pytest.mark.parametrize("page", ["README.rst", "docs/guides/guarantees-and-limits.rst"])
def test_every_setting_that_a_page_of_promises_names_exists(page: str) -> None:
    named = set(re.findall(r"``(dq_[a-z_]+)", (ROOT / page).read_text()))
    assert "dq_lease" in named
    assert named - {setting.name for setting in SETTINGS} == set()
