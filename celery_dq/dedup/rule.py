"""The dedup rule of a task: ``@dedup(...)``, the task option, or the option of one call.

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
        key: calls with equal keys are duplicates: a template over the arguments, a callable that takes the
            arguments, or None for all arguments.
        timeout: seconds (or a timedelta) after which a waiting call may evict the run; None is never. The
            time begins when a worker gets the message. A pool that can end tasks ends the task a tenth of
            the timeout earlier, at most one second.
        on_duplicate: ``"decline"`` answers with the covering call; ``"replace"`` gives the new call the
            place of the waiting one; ``"raise"`` raises :class:`~celery_dq.errors.DuplicateCall`.
        waiting: 1: one call may wait while another runs. 0: no call may wait.
        name: prefix of every key; default: the task's name. Tasks with the same name share their keys.
        verdict: ``"now"``: the broker answers before the call returns. ``"later"``: the call may go through
            the producer's buffer, as calls without a key do, and its result has no verdict. A call that is
            then declined ends with the result of the covering call.
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
                "dedup: verdict='later' and on_duplicate='raise' contradict: the call has returned before "
                "its verdict; give on_duplicate='decline' or 'replace', or verdict='now'"
            )
        if self.on_duplicate not in ("decline", "replace", "raise"):
            raise ConfigurationError(
                f"dedup: on_duplicate={self.on_duplicate!r} is none of 'decline', 'replace', 'raise'"
            )
        if self.waiting not in (0, 1) or isinstance(self.waiting, float):
            raise ConfigurationError(
                f"dedup: waiting={self.waiting!r}: give 1 (one call may wait behind a run) or 0 (no call may)"
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
    """Give a function that will be a task a dedup rule. The arguments are those of :class:`Dedup`.

    Raises:
        ConfigurationError: An argument is unusable, or the decorator is above the task decorator.
    """
    rule = Dedup(key, timeout, on_duplicate, waiting, name, verdict)

    def decorate(function: _F) -> _F:
        if not (inspect.isroutine(function) or inspect.isclass(function)):
            raise ConfigurationError(
                f"@dedup is above the task decorator of {function!r}: put it below, next to the function"
            )
        setattr(function, _ATTRIBUTE, rule)
        return function

    return decorate


def rule_of(task: Any) -> Dedup | None:
    """Return the rule of a task: its option, else its function's decorator; None when it has neither."""
    option = getattr(task, "dedup", None)
    if option is None or inspect.isroutine(option):
        # With ``autoretry_for``, the wrapper that Celery makes has the attributes of the function.
        rule: Dedup | None = getattr(task.run, _ATTRIBUTE, None)
        return rule
    return override(None, option, where=f"task {task.name}")


def override(rule: Dedup | None, option: Any, *, where: str) -> Dedup | None:
    """Return the rule of one call: its ``option`` over the rule of the task.

    Args:
        rule: the rule of the task.
        option: False for no dedup, True for the task's rule (if there is none, all arguments are the key),
            a mapping of fields that differ, or a whole :class:`Dedup`.
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
