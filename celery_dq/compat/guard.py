"""The check at start-up that the private names of :mod:`celery_dq.compat.table` exist as they were read.

A module of this package calls :func:`check` when it is imported or first used. A missing name stops the
process there with a clear error. Otherwise it would fail, or silently do something else, at a later call.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.metadata import version
from types import CodeType
from typing import Any

from celery_dq.compat.table import READ_VERSIONS, TABLE, PrivateName
from celery_dq.errors import ConfigurationError

__all__ = ["check", "problem_of"]


def check(*users: str) -> None:
    """Check the names that these modules use.

    Raises:
        ConfigurationError: A name is missing, or a function has other parameters.
    """
    _refuse(each for each in TABLE if each.user in users)


def _refuse(names: Iterable[PrivateName]) -> None:
    for name in names:
        problem = problem_of(name)
        if problem:
            oldest, newest = READ_VERSIONS[name.library]
            raise ConfigurationError(
                f"{name.library} {version(name.library)}: {problem}, which celery-dq uses for: {name.why}. "
                f"Install {name.library} {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}, or a later "
                "celery-dq"
            )


def problem_of(name: PrivateName) -> str:
    """Return how the installed library differs from what was read; "" if it does not."""
    owner: Any = import_module(name.module)
    *path, last = name.name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    full = f"{name.module}.{name.name}"
    found = getattr(owner, last, None)
    if found is None:
        return "" if _has(owner, last) else f"{full} does not exist"
    if name.parameters:
        wanted = name.parameters.split()
        parameters = inspect.signature(found).parameters
        has = list(parameters)
        kinds = [each.kind for each in parameters.values()]
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            # A monitoring tool has replaced the function by one that passes on its arguments.
            wanted = wanted[: kinds.index(inspect.Parameter.VAR_POSITIONAL)]
        if has[: len(wanted)] != wanted:
            return f"{full} has the parameters ({', '.join(has)}) instead of ({', '.join(wanted)}, …)"
    return ""


def _has(owner: Any, name: str) -> bool:
    """Whether the object has the name, or functions of a class use it as an attribute of instances."""
    if hasattr(owner, name):
        return True
    classes = owner.__mro__ if isinstance(owner, type) else ()
    functions = [member for each in classes for member in vars(each).values() if inspect.isfunction(member)]
    return any(name in code.co_names for member in functions for code in _codes(member.__code__))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)
