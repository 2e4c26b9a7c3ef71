"""The result of a fault run, from the book."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.singleton.posting_app import Book, Entry


@dataclass
class Verdict:
    sent: int = 0
    lost: list[int] = field(default_factory=list)
    disordered: list[tuple[int, int]] = field(default_factory=list)
    run_again: list[int] = field(default_factory=list)
    #: Entries of an older term after the start of a newer one (overlapping executions); the book refuses
    #: them.
    stale: list[Entry] = field(default_factory=list)
    #: Tokens of terms whose session the server ended before its time. No leader can know of that in time, so
    #: its last message may overlap the next term.
    ended_early: set[int] = field(default_factory=set)
    #: Entries that were accepted although stale; never allowed.
    accepted_stale: int = 0
    terms: int = 0
    #: (fault, seconds without progress)
    outages: list[tuple[str, float]] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        overlaps = [entry for entry in self.stale if entry.token not in self.ended_early]
        return not (self.lost or self.disordered or overlaps or self.accepted_stale)

    def __str__(self) -> str:
        outages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.outages)
        return (
            f"{self.sent} messages, {self.terms} terms: {len(self.lost)} lost, "
            f"{len(self.disordered)} out of order, {len(self.run_again)} run again, "
            f"{len(self.stale)} overlaps, {self.accepted_stale} stale effects accepted; "
            f"longest silence: {outages}"
        )

    def read(self, book: Book) -> None:
        """Compute the result from the book alone."""
        entries = book.entries()
        finished = [entry.number for entry in entries if entry.event == "finish"]
        self.lost = sorted(set(range(self.sent)) - set(finished))
        self.run_again = sorted({number for number in finished if finished.count(number) > 1})
        position = token = -1
        for entry in entries:
            self.accepted_stale += entry.token < token
            token = max(token, entry.token)
            # A message starts after the one before it has started; an interrupted one may start again.
            if entry.event == "start":
                if entry.number not in (position, position + 1):
                    self.disordered.append((position, entry.number))
                position = entry.number
        self.terms = len({entry.token for entry in entries})
        self.stale = book.refused()
