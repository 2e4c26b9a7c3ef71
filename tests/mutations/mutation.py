"""A deliberate fault in one place of the package, and the tests that must see it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

#: A short name for each row of the table of promises (guide "Guarantees and limits"), and how the row begins.
PROMISES = {
    "custody": "A message is in the broker or under a lease, never in between.",
    "recovery": "A dead worker's messages come back to their old places within seconds.",
    "heartbeat": "A long task is not delivered twice; there is no visibility timeout.",
    "rate": "A tenant gets at most",
    "concurrency": "At most ``concurrency`` of a tenant's messages are in workers' hands.",
    "bounded": "No push makes the backlog of a tenant longer than ``max_waiting``",
    "fairness": "No tenant's backlog delays another's turn.",
    "inheritance": "With ``dq_inherit_tenant``, a call of a task that names no tenant",
    "poison": "A message that kills its workers is given up on after ``dq_max_deliveries``.",
    "throttled": "A task that raises ``Throttled`` runs again after its pause",
    "eta": "A task with an ETA waits in the broker.",
    "dedup": "Of the calls with one dedup key at most one runs and at most one waits",
    "singleton": "Of the workers of a singleton queue",
    "buffer": "A buffered call (``dq_buffer``) that has returned is published",
    "outbox": "A call in a transaction of a database in ``dq_outbox`` is published if",
    "zookeeper": "On ``dq-zookeeper://``, a message stays in its queue until it is acknowledged",
    "once": "A publish that is repeated after a lost connection adds no second message.",
    "awaited": "An awaited call (``adelay``) that is cancelled is published once or not at all.",
    "revoke": "A revoked task that has not started does not run.",
    "beat": "",
    "calls": "",
    "shared": "",
    "stores": "",
}


class Mutation(NamedTuple):
    """One fault.

    Attributes:
        promise: the key of `PROMISES` that it breaks.
        what: the fault, in a few words; unique.
        file: the file, relative to the package.
        old: text that stands exactly once in the file.
        new: the text in its place.
        tests: arguments of pytest (node ids, or files with ``-k``) that must fail, each list under a minute.
    """

    promise: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def runs(self) -> list[tuple[str, ...]]:
        """Arguments of pytest for the run of its tests."""
        return [self.tests]

    def apply(self, source: str) -> str:
        """Return the source of the file with the fault."""
        return source.replace(self.old, self.new)


def misfits(mutations: Iterable[Mutation], root: Path = ROOT) -> list[str]:
    """The mutations that break nothing, or not the place that is meant, or name no test; and why."""
    found: list[str] = []
    seen: set[str] = set()
    for each in mutations:
        file = root / "celery_dq" / each.file
        times = file.read_text(encoding="utf-8").count(each.old) if file.exists() else 0
        if times != 1 or each.old == each.new:
            found.append(f"{each.what}: {each.file} has {times} times {each.old!r}")
        if each.promise not in PROMISES:
            found.append(f"{each.what}: no promise is called {each.promise!r}")
        if each.what in seen:
            found.append(f"{each.what}: a second mutation of this name")
        seen.add(each.what)
        files = [test.partition("::")[0] for test in each.tests if test.startswith("tests/")]
        missing = [name for name in files if not (root / name).exists()]
        if not files or missing:
            found.append(f"{each.what}: no such tests: {missing or each.tests}")
    return found
