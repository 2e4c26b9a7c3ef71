"""The verdict on the ledger, by comparison with the plan. Pure."""

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
    """The findings about a ledger.

    Attributes:
        posted: Number of lines in the ledger.
        missing: Numbers without a line.
        disordered: Lines after a line with a higher number.
        wrong: Lines whose balance does not follow from the line before.
        fallen: Lines with a lower token than the line before.
        terms: Number of leaders that posted, one after the other.
        refused: Postings with a stale token, which the ledger refused.
        balance: The last balance.
        pauses: Seconds without a posting around each change of leader.
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
        """Whether the ledger has no fault."""
        return not (self.missing or self.disordered or self.wrong or self.fallen)

    def as_dict(self) -> dict[str, Any]:
        """Return the findings as JSON."""
        return {**asdict(self), "clean": self.clean}


def judge(plan: Sequence[Entry], lines: Sequence[Line], refused: int) -> Verdict:
    """Compare the ledger with the plan.

    Args:
        plan: The planned postings.
        lines: The lines in the order of their posting.
        refused: Number of refused postings.
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
