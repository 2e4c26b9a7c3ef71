"""The verdict on the ledger. Pure: it knows what should have been posted, and sees what was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from books.plan import Entry, apply


@dataclass(frozen=True)
class Line:
    """One line of the ledger as it was posted."""

    number: int
    kind: str
    amount: int
    balance: int
    token: int
    worker: str
    posted_at: float


@dataclass(frozen=True)
class Verdict:
    """What the judge found.

    Attributes:
        posted: lines in the ledger.
        missing: numbers that are not there.
        disordered: lines that stand behind a later number.
        wrong: lines whose balance is not that of the line before, and the posting.
        fallen: lines whose token is lower than that of the line before.
        terms: how many leaders posted, one after the other.
        refused: postings with a stale token, which the ledger turned away.
        balance: the last one.
        pauses: seconds without a posting around each change of leader.
    """

    posted: int
    missing: tuple[int, ...]
    disordered: int
    wrong: int
    fallen: int
    terms: int
    refused: int
    balance: int
    pauses: tuple[float, ...]

    @property
    def clean(self) -> bool:
        """Whether the ledger is what it should be."""
        return not (self.missing or self.disordered or self.wrong or self.fallen)

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "clean": self.clean}


def judge(plan: Sequence[Entry], lines: Sequence[Line], refused: int) -> Verdict:
    """Compare the ledger with the plan.

    :param lines: in the order in which they were posted.
    """
    seen = {line.number for line in lines}
    pairs = list(pairwise(lines))
    before = [0, *(line.balance for line in lines)]
    changes = [(earlier, later) for earlier, later in pairs if later.token != earlier.token]
    return Verdict(
        posted=len(lines),
        missing=tuple(entry.number for entry in plan if entry.number not in seen),
        disordered=sum(later.number < earlier.number for earlier, later in pairs),
        wrong=sum(line.balance != apply(before[at], line.kind, line.amount) for at, line in enumerate(lines)),
        fallen=sum(later.token < earlier.token for earlier, later in pairs),
        terms=len({line.token for line in lines}),
        refused=refused,
        balance=before[-1],
        pauses=tuple(round(later.posted_at - earlier.posted_at, 2) for earlier, later in changes),
    )
