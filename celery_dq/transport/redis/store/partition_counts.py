"""The number of partitions of each queue, as one process knows it from the broker."""

from __future__ import annotations


class PartitionCounts:
    """Remembers the numbers, and that one of them may be out of date.

    The consuming threads write the numbers. Any thread may doubt one. A channel that consumes compares
    :attr:`changes` with the value that it has seen, which costs no look-up by name.

    Attributes:
        changes: Grows when a known number has changed, or is in doubt.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._counts: dict[str, int] = {}
        self._doubted: set[str] = set()

    def get(self, queue: str) -> int | None:
        """Return the number of partitions of a queue; None before the first look."""
        return self._counts.get(queue)

    def learn(self, queue: str, count: int) -> None:
        """Note the number that partition 0 of a queue has stored."""
        known = self._counts.get(queue)
        self._counts[queue] = count
        if known not in (None, count):
            self.changes += 1

    def doubt(self, queue: str) -> None:
        """Note that a partition of a queue has stored another number, so that partition 0 must be asked."""
        self._doubted.add(queue)
        self.changes += 1

    def take_doubts(self) -> set[str]:
        """Return the queues whose numbers are in doubt, each once."""
        doubted = set()
        while self._doubted:
            doubted.add(self._doubted.pop())
        return doubted
