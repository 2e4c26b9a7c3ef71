"""What plugs into the model: calls, and what keeps their keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from celery_dq.dedup.machine import Policy, Verdict

KEYS = ('a(x="ä*{}")', "b")
#: Seconds that a lease holds; every timeout of a run and every step of time is another number.
LEASE = 10


class Told(NamedTuple):
    """What a call was told; ``token`` is 0 when it does not run yet."""

    verdict: Verdict
    covering: str
    token: int = 0
    replaced: str = ""


@dataclasses.dataclass(repr=False)
class Call:
    """One delivery of a task. ``token``: that of its run, as its owner knows; ``lease``: when that ends."""

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
        # In the story that hypothesis tells of a failure.
        printer.text(f"{self.id} of {self.owner}")


class Standing(NamedTuple):
    """How a key stands: who is head, heir and tail, '' for nobody, and the token of the head."""

    head: str = ""
    heir: str = ""
    tail: str = ""
    token: int = 0


class Driver(Protocol):
    """What keeps the keys, and is put to the test. Where it runs, time is what :meth:`at` says."""

    #: An owner that is silent for a lease has lost its calls.
    leases: bool
    #: What a look at a key sweeps away first: 'all' that is over, only an overdue head ('head'), or nothing.
    sweeps: dict[str, str]

    def reset(self) -> None: ...
    def at(self, seconds: int) -> None: ...
    def ask(self, call: Call) -> Told: ...
    def start(self, call: Call) -> int | None: ...
    def end(self, call: Call, token: int) -> bool: ...
    def give_back(self, call: Call, token: int) -> bool: ...
    def withdraw(self, call: Call) -> bool: ...
    def renew(self, owner: str, calls: Sequence[Call]) -> list[bool]: ...
    def free(self, key: str) -> None: ...
    def forget_scripts(self) -> None: ...
    def look(self) -> None: ...
    def standing(self, key: str) -> Standing: ...
    def told(self) -> set[tuple[str, str]] | None: ...
    def check(self, living: Sequence[Call]) -> None: ...
    def left(self) -> set[str]: ...
