"""What a task says of its duplicates: ``@dedup(...)``, the task option, or the option of one call.

::

    @shared_task
    @dedup(key="{sku}", timeout=60)          # below the task decorator
    def refresh(sku): ...

    @app.task(dedup={"key": "{sku}"})        # the same as a task option
    def refresh(sku): ...

    refresh.apply_async((7,), dedup=False)   # this call only
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, TypeVar

from celery_dq.errors import ConfigurationError

__all__ = ["Dedup", "DuplicatePolicy", "dedup", "rule_of"]

DuplicatePolicy = Literal["decline", "replace", "raise"]

_ATTRIBUTE = "__dq_dedup__"
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Dedup:
    """How the calls of a task exclude each other.

    Attributes:
        key: what makes two calls the same: a template over the arguments, a callable that is given them, or
            None for all arguments.
        timeout: seconds (or a timedelta) after which a run may be evicted in favour of one that waits,
            counted from when a worker got it; None is never. Where the pool can end a task, it
            is ended shortly before (a tenth of it, at most a second).
        on_duplicate: ``"decline"`` answers with the call that covers this one; ``"replace"`` gives this one
            the place of the one that waits; ``"raise"`` raises :class:`~celery_dq.errors.DuplicateCall`.
        waiting: 1: one call may wait while another runs. 0: none may.
        name: in front of every key; default: the task's name. Tasks of one name share their keys.
        verdict: ``"now"``: the broker is asked before the call returns. ``"later"``: the call may go through
            the producer's buffer, as calls without a key do, and its result has no verdict; a call that is
            then declined ends with the result of the one that covers it.
    """

    key: str | Callable[..., Any] | None = None
    timeout: float | timedelta | None = None
    on_duplicate: DuplicatePolicy = "decline"
    waiting: int = 1
    name: str | None = None
    verdict: Literal["now", "later"] = "now"

    def __post_init__(self) -> None:
        if self.verdict not in ("now", "later"):
            raise ConfigurationError(f"dedup: verdict={self.verdict!r} is neither 'now' nor 'later'")
        if self.verdict == "later" and self.on_duplicate == "raise":
            raise ConfigurationError(
                "dedup: verdict='later' and on_duplicate='raise': the call has returned when its verdict "
                "comes; give 'decline' or 'replace', or ask for the verdict now"
            )
        if self.on_duplicate not in ("decline", "replace", "raise"):
            raise ConfigurationError(
                f"dedup: on_duplicate={self.on_duplicate!r} is none of 'decline', 'replace', 'raise'"
            )
        if self.waiting not in (0, 1) or isinstance(self.waiting, float):
            raise ConfigurationError(
                f"dedup: waiting={self.waiting!r}: give 1 (one may wait while another runs) or 0 (none may)"
            )
        seconds = self.seconds
        if seconds is not None and not 0 < seconds < 1e9:
            raise ConfigurationError(f"dedup: timeout={self.timeout!r} is not a number of seconds above 0")

    @property
    def seconds(self) -> float | None:
        """The timeout in seconds."""
        if isinstance(self.timeout, timedelta):
            return self.timeout.total_seconds()
        if self.timeout is None:
            return None
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, (int, float)):
            raise ConfigurationError(f"dedup: timeout={self.timeout!r} is neither a number nor a timedelta")
        return float(self.timeout)


def dedup(
    *,
    key: str | Callable[..., Any] | None = None,
    timeout: float | timedelta | None = None,
    on_duplicate: DuplicatePolicy = "decline",
    waiting: int = 1,
    name: str | None = None,
    verdict: Literal["now", "later"] = "now",
) -> Callable[[_F], _F]:
    """Decorate a function that will be a task; the arguments are those of :class:`Dedup`.

    Raises:
        ConfigurationError: An argument is unusable, or the decorator stands above the task decorator.
    """
    rule = Dedup(key, timeout, on_duplicate, waiting, name, verdict)

    def decorate(function: _F) -> _F:
        if not (inspect.isroutine(function) or inspect.isclass(function)):
            raise ConfigurationError(
                f"@dedup stands above the task decorator of {function!r}: put it below, next to the function"
            )
        setattr(function, _ATTRIBUTE, rule)
        return function

    return decorate


def rule_of(task: Any) -> Dedup | None:
    """Return what a task says: its option, else its function's decorator; None when it says nothing."""
    option = getattr(task, "dedup", None)
    if option is None or inspect.isroutine(option):
        for function in (getattr(task, "_orig_run", None), task.run):
            found = getattr(function, _ATTRIBUTE, None)
            if found is not None:
                rule: Dedup = found
                return rule
        return None
    return override(None, option, where=f"task {task.name}")


def override(rule: Dedup | None, option: Any, *, where: str) -> Dedup | None:
    """Return the rule of one call: ``option`` over what the task says.

    Arguments:
        rule: what the task says.
        option: False for no dedup, True for the task's (else all arguments are the key), a mapping of
            fields that differ, or a whole :class:`Dedup`.
        where: names the task in errors.

    Raises:
        ConfigurationError: the option is of another type, or has a field that does not exist.
    """
    if option is None:
        return rule
    if option is False:
        return None
    if option is True:
        return rule or Dedup()
    if isinstance(option, Dedup):
        return option
    if isinstance(option, Mapping):
        known = {field.name for field in dataclasses.fields(Dedup)}
        unknown = sorted(set(map(str, option)) - known)
        if unknown:
            raise ConfigurationError(
                f"{where}: dedup has no {unknown[0]!r}; there are {', '.join(sorted(known))}"
            )
        return dataclasses.replace(rule or Dedup(), **option)
    raise ConfigurationError(
        f"{where}: dedup={option!r} is of type {type(option).__name__}; give a dict such as "
        "{'key': '{sku}'}, True or False"
    )
