"""``--args`` and ``--kwargs``: new arguments of a task, in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

__all__ = ["arguments_options", "read_arguments"]


def arguments_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options ``--args`` (``args_``) and ``--kwargs`` to a command."""
    function = click.option("--kwargs", help="The named arguments, a JSON object.")(function)
    return click.option("--args", "args_", help="The positional arguments, a JSON list.")(function)


def read_arguments(args: str | None, kwargs: str | None) -> dict[str, Any]:
    """Return the given ones of ``args`` and ``kwargs``.

    Raises:
        click.BadParameter: One of them is not JSON.
    """
    given = {"args": args, "kwargs": kwargs}
    return {name: _read_json(name, text) for name, text in given.items() if text is not None}


def _read_json(name: str, given: str) -> Any:
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as exc:
        raise click.BadParameter(f"{given!r} is not JSON: {exc}", param_hint=f"--{name}") from exc
