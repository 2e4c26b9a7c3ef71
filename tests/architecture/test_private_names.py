"""Private names of other libraries occur in ``compat/`` only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "celery_dq"
LIBRARIES = ("amqp", "billiard", "celery", "kazoo", "kombu", "redis")

#: Named tuples have these public methods.
PUBLIC = {"_asdict", "_fields", "_replace"}

#: Private names of this package and of Python that one class uses of another object.
OWN = {
    ("app/publishing/results.py", "_cache"),  # of the class in this module, as in Celery's
    ("app/publishing/results.py", "_ignored"),
    ("producer/buffered_producer.py", "_get_running_loop"),  # asyncio: whether a loop runs in this thread
    ("producer/message_store.py", "_is_owned"),  # a lock of Python
    ("producer/singular_update_queue.py", "_apply_all"),
    ("producer/singular_update_queue.py", "_max_batch"),
    ("transport/redis/transport.py", "_raw"),
    ("transport/tenant.py", "_argument"),
    ("transport/tenant.py", "_arguments"),
}

#: Places in the worker that one seam to the life of a task is to replace, and one name that kombu's base of a
#: transport has for its channels.
LEFT = {
    ("transport/redis/transport.py", "_deliver"),
    ("worker/task_events.py", "_process_task"),
    ("worker/task_events.py", "_quick_release"),
    ("worker/lifecycle.py", "_pool"),
    ("other_brokers/dedup_calls.py", "_payload"),
    ("worker/discards.py", "_context"),
    ("worker/discards.py", "_payload"),
    ("worker/discards.py", "_request_dict"),
    ("other_brokers/singleton_sequencer.py", "_already_revoked"),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in PUBLIC


def private_names(tree: ast.Module) -> Iterator[str]:
    """The private names that a module imports from a library, or uses of an object that is not ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in LIBRARIES:
            parts = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            yield from filter(is_private, parts)
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names for part in alias.name.split(".")]
            yield from filter(is_private, parts)
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if ast.unparse(node.value) not in {"self", "cls", "super()"}:
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "setattr", "hasattr"}:
            owner, name = node.args[:2]
            if ast.unparse(owner) != "self" and isinstance(name, ast.Constant):
                yield from filter(is_private, [str(name.value)])


def test_private_names_are_used_in_compat_only() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "compat"
        for name in private_names(ast.parse(path.read_text()))
    }
    assert found - OWN - LEFT == set()
    assert (OWN | LEFT) - found == set(), "these exceptions are not needed any more"


@pytest.mark.parametrize(
    "line",
    [
        "from celery._state import x",
        "from celery import _state",
        "import kombu._x",
        "app._tasks",
        "self.app._tasks",
        "getattr(app, '_tasks', None)",
        "connection._x = 1",
        "del producer._x",
    ],
)
def test_a_private_name_is_found(line: str) -> None:
    assert list(private_names(ast.parse(line)))


@pytest.mark.parametrize("line", ["self._x", "super()._x()", "row._asdict()", "app.tasks", "x.__dict__"])
def test_other_names_are_none(line: str) -> None:
    assert list(private_names(ast.parse(line))) == []
