"""The interface of the model: calls, and the driver of the implementation under test."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from celery_dq.dedup.machine import Policy, Verdict

KEYS = ('a(x="ä*{}")', "b")
#: Seconds of a lease. No timeout of a run and no step of time has the same number.
LEASE = 10


class Answer(NamedTuple):
    """The answer to a call; ``token`` is 0 when it does not run yet."""

    verdict: Verdict
    covering: str
    token: int = 0
    replaced: str = ""


@dataclasses.dataclass(repr=False)
class Call:
    """One delivery of a task. ``token``: of its run, as its owner has it; ``lease``: the end of its lease."""

    id: str
    task: str
    key: str
    owner: str
    policy: Policy = "decline"
    waiting: int = 1
    timeout: int | None = None
    kind: str = ""
    token: int = 0
    lease: float = float("inf")

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # The text in the story that hypothesis prints for a failure.
        printer.text(f"{self.id} of {self.owner}")


class Standing(NamedTuple):
    """The state of a key: head, heir and tail, '' for no call, and the token of the head."""

    head: str = ""
    heir: str = ""
    tail: str = ""
    token: int = 0


class Driver(Protocol):
    """The implementation under test. :meth:`at` sets its time."""

    #: Whether an owner that is silent for a lease loses its calls.
    leases: bool
    #: Verb -> calls that it removes from a key first: 'all' that are over, only an overdue 'head', or none.
    sweeps: dict[str, str]

    def reset(self) -> None: ...
    def at(self, seconds: int) -> None: ...
    def ask(self, call: Call) -> Answer: ...
    def start(self, call: Call) -> int | None: ...
    def end(self, call: Call, token: int) -> bool: ...
    def release_call(self, call: Call, token: int) -> bool: ...
    def withdraw(self, call: Call) -> bool: ...
    def renew(self, owner: str, calls: Sequence[Call]) -> list[bool]: ...
    def free(self, key: str) -> None: ...
    def forget_scripts(self) -> None: ...
    def look(self) -> None: ...
    def standing(self, key: str) -> Standing: ...
    def woken_owners(self) -> set[tuple[str, str]] | None: ...
    def check(self, living: Sequence[Call]) -> None: ...
    def left(self) -> set[str]: ...
