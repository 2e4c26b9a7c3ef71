"""Compares each callable that celery-dq puts in the place of another one with the one that it replaces.

Celery, kombu and billiard pass arguments by position or by keyword, and billiard only logs the ``TypeError``
of a callback. So a replacement has to accept every call that the original accepts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from celery.worker import state
from celery.worker.control import inspect_command

#: A job of the pool keeps these methods of its request.
_JOB = {
    "_accept_callback": "on_accepted",
    "_callback": "on_success",
    "_error_callback": "on_failure",
    "_timeout_callback": "on_timeout",
}
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Replaced(NamedTuple):
    """A callable in the place of another one."""

    name: str
    original: Callable[..., Any]
    replacement: Callable[..., Any]


def refusals(original: Callable[..., Any], replacement: Callable[..., Any]) -> list[str]:
    """The calls that `original` accepts and `replacement` does not."""
    parameters = [
        parameter
        for parameter in inspect.signature(original, follow_wrapped=False).parameters.values()
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, *_NAMED)
    ]
    required = [parameter for parameter in parameters if parameter.default is parameter.empty]
    signature = inspect.signature(replacement, follow_wrapped=False)
    found = []
    for given in (parameters, required):
        for count in range(len(given) + 1):
            # The first ones by position, the others by keyword.
            positional, named = given[:count], given[count:]
            if any(each.kind is inspect.Parameter.KEYWORD_ONLY for each in positional):
                continue
            if any(each.kind is inspect.Parameter.POSITIONAL_ONLY for each in named):
                continue
            try:
                signature.bind(*[None] * count, **{each.name: None for each in named})
            except TypeError as error:
                found.append(f"{count} by position, {[each.name for each in named]} by keyword: {error}")
    return found


def replaced_on(owner: Any, label: str) -> Iterator[Replaced]:
    """The methods of `owner` that were replaced on the instance, or by a class of celery-dq."""
    for name, replacement in list(getattr(owner, "__dict__", {}).items()):
        original = _bound(owner, name, lambda kind: True)
        if callable(original) and callable(replacement) and _is_ours(replacement):
            yield Replaced(f"{label}.{name}", original, replacement)
    for name in dir(type(owner)):
        kind = next((kind for kind in type(owner).__mro__ if name in kind.__dict__), object)
        if name.startswith("__") or not kind.__module__.startswith("celery_dq"):
            continue
        original = _bound(owner, name, lambda kind: not kind.__module__.startswith("celery_dq"))
        replacement = _bound(owner, name, lambda kind: True)
        if inspect.isroutine(original) and inspect.isroutine(replacement):
            yield Replaced(f"{label}.{name}", original, replacement)


def _is_ours(replacement: Any) -> bool:
    """Whether celery-dq made it: ``functools.wraps`` copies the module's name of the original."""
    function = getattr(replacement, "func", replacement)
    function = getattr(function, "__func__", function)
    scope = getattr(function, "__globals__", {"__name__": type(function).__module__})
    return str(scope["__name__"]).startswith("celery_dq")


def _bound(owner: Any, name: str, counts: Callable[[type], bool]) -> Any:
    """The attribute as the first class that counts has it."""
    for kind in type(owner).__mro__:
        if counts(kind) and name in kind.__dict__:
            attribute = kind.__dict__[name]
            bind = getattr(attribute, "__get__", None)
            return attribute if bind is None or isinstance(attribute, property) else bind(owner, type(owner))
    return None


def replaced_in_worker(consumer: Any) -> Iterator[Replaced]:
    """All replaced attributes in a worker; running functions are checked, too."""
    app, pool = consumer.app, consumer.pool
    children = getattr(pool, "_pool", None)
    for owner, label in (
        (app, "app"),
        (app.amqp, "amqp"),
        (app.control, "control"),
        (app.backend, "backend"),
        (consumer, "consumer"),
        (consumer.controller, "worker"),
        (pool, "pool"),
        (children, "children"),
        (getattr(children, "_result_handler", None), "results"),
    ):
        yield from replaced_on(owner, label)
    for task in app.tasks.values():
        if hasattr(task.__trace__, "__wrapped__"):
            yield Replaced("task.__trace__", task.__trace__.__wrapped__, task.__trace__)
    for request in list(state.active_requests):
        yield from replaced_on(request, "request")
        yield from replaced_on(request.message, "message")
        job = request._apply_result and request._apply_result()
        for name, of in _JOB.items():
            if hasattr(job, name):
                yield Replaced(f"job.{name}", getattr(type(request), of).__get__(request), getattr(job, name))


@inspect_command()
def replaced(state: Any) -> dict[str, list[str]]:
    """By each callable that was replaced in this worker, the calls that it refuses."""
    return {
        each.name: refusals(each.original, each.replacement) for each in replaced_in_worker(state.consumer)
    }
