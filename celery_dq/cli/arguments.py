"""Arguments of several commands: a task's new arguments in JSON, times and durations, known names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import Any, TypeVar

import click

from celery_dq.app.api.api import DQ
from celery_dq.duration import parse_duration
from celery_dq.errors import ConfigurationError, InvalidRequest

F = TypeVar("F", bound=Callable[..., Any])


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
    return {name: read_json(name, text) for name, text in given.items() if text is not None}


def read_json(name: str, given: str) -> Any:
    """Read the JSON of the option ``--name``.

    Raises:
        click.BadParameter: It is not JSON.
    """
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as exc:
        raise click.BadParameter(f"{given!r} is not JSON: {exc}", param_hint=f"--{name}") from exc


ABOVE_0 = click.FloatRange(0, min_open=True)
UP_TO_A_DAY = click.FloatRange(0, 86_400)


def seconds_option(name: str, default: float, meaning: str, kind: click.FloatRange) -> Callable[[F], F]:
    """Decorate a command: add an option that takes a number of seconds."""
    return click.option(name, type=kind, default=default, show_default=True, help=meaning)


def listed(names: Sequence[str]) -> str:
    """Return the first of some names for a text."""
    return f"{', '.join(map(repr, names[:10]))}{', …' if len(names) > 10 else ''}"


def time(text: str) -> datetime:
    """Read a time in ISO format; without a zone it is local time."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{text!r} is not a time such as 2026-03-01T18:00 (local time) or 2026-03-01T17:00Z"
        ) from None


def duration(text: str) -> timedelta:
    """Read a duration such as ``90s``, ``15m`` or ``2h``; a number is seconds."""
    with_unit = f"{text}s" if text.replace(".", "", 1).isdecimal() else text
    try:
        return timedelta(microseconds=parse_duration(with_unit, option="the duration"))
    except (ConfigurationError, OverflowError) as exc:
        raise click.BadParameter(str(exc)) from None


def since(text: str) -> datetime:
    """Read a time in ISO format, or a duration before now such as ``2h``."""
    if text[-1:].isdecimal() or text.endswith("Z"):
        return time(text)
    try:
        return datetime.now().astimezone() - duration(text)
    except click.BadParameter:
        raise click.BadParameter(
            f"{text!r} is not a time such as 2026-03-01T18:00, nor a duration such as 2h"
        ) from None
    except OverflowError:
        raise click.BadParameter(f"{text!r} is before the year 1; give a shorter duration") from None


#: Number of tenants with a backlog that are compared with an unknown name.
MOST_TENANTS = 10_000


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a question with the nearest known name, for the end of a text; "" when none is close."""
    close = get_close_matches(name, [*known], 1)
    return f" Did you mean {close[0]!r}?" if close else ""


def require_queue(name: str, known: Iterable[str]) -> None:
    """Check that a queue exists.

    Args:
        name: Name of the queue.
        known: Names of the queues that the app declares or the broker has.

    Raises:
        InvalidRequest: The queue does not exist.
    """
    names = sorted(known)
    if name not in names:
        known_ones = f" Known queues: {listed(names)}."
        raise InvalidRequest(f"There is no queue {name!r}.{nearest(name, names) or known_ones}")


def queue_and_partition(name: str, known: Iterable[str]) -> tuple[str, int | None]:
    """Return a queue and the number of its partition for a name such as ``push/3``; None for a whole queue.

    Raises:
        InvalidRequest: The queue does not exist.
    """
    names = list(known)
    whole, _, number = name.rpartition("/")
    if name not in names and whole in names and number.isdecimal():
        return whole, int(number)
    require_queue(name, names)
    return name, None


def unknown_tenant(dq: DQ, queue: str, tenant: str) -> str:
    """Return an error text for a tenant without messages and quota in a queue; "" for a known tenant."""
    if dq.queues[queue].has_tenant(tenant):
        return ""
    known = {each.tenant for each in dq.queues[queue].tenants(MOST_TENANTS)} | {*dq.quotas.list(queue)}
    return f"Tenant {tenant!r} has no message in {queue!r} and no quota of its own.{nearest(tenant, known)}"
