"""Estimate whether dedup is worth its cost, by how often the calls of a queue repeat each other.

The *minimal repeat distance* of a key is the smallest distance between two of its calls, in calls. Two calls
of one key at a distance of at most the number of consumers are likely to run at the same time:

* *none*: no key occurs twice. Dedup saves nothing.
* *sparse*: keys repeat, mostly at a distance larger than the number of consumers. Few calls overlap; dedup
  saves only the calls that a tail covers.
* *high*: most repeated keys do so within the number of consumers. Dedup pays.

Pure.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from celery_dq.errors import MissingLibrary

__all__ = ["Repetition", "RepetitionKind", "repetition"]


class RepetitionKind(str, enum.Enum):
    """See the module."""

    NONE = "none"
    SPARSE = "sparse"
    HIGH = "high"


@dataclass(frozen=True)
class Repetition:
    """The result for a sample of calls.

    Attributes:
        kind: none, sparse or high.
        consumers: how many calls run at a time.
        calls: size of the sample.
        keys: how many keys it has.
        repeated: how many keys occur more than once.
        close: how many repeated keys have a minimal repeat distance of at most `consumers`.
        covered: calls that dedup would have declined, if the whole sample had waited at once.
        distances: minimal repeat distance -> number of keys.
    """

    kind: RepetitionKind
    consumers: int
    calls: int
    keys: int
    repeated: int
    close: int
    covered: int
    distances: dict[int, int]

    @property
    def saved(self) -> float:
        """The share of the work that dedup would have saved, 0 to 1."""
        return self.covered / self.calls if self.calls else 0.0

    @property
    def advice(self) -> str:
        """The result in one sentence, with the saving."""
        if self.kind is RepetitionKind.NONE:
            return "No call repeats another: dedup has nothing to do here."
        if self.kind is RepetitionKind.SPARSE:
            return (
                f"Calls repeat, but mostly at a distance of more than {self.consumers} calls: dedup would "
                f"save {self.saved:.0%} of a backlog like this, and prevent few overlaps."
            )
        return (
            f"{self.close} of {self.repeated} repeated keys come again within {self.consumers} calls, so "
            f"they run at the same time: dedup would save {self.saved:.0%} of a backlog like this."
        )

    def plot(self, path: str | Path) -> None:
        """Draw how many keys repeat at which distance, as PNG or SVG. Needs the extra 'plots'."""
        try:
            from matplotlib.figure import Figure
        except ImportError as exc:
            raise MissingLibrary.needed_by("A plot", "matplotlib", "plots") from exc

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.bar(list(self.distances), list(self.distances.values()), width=1.0, color="#4477aa")
        axes.axvline(self.consumers + 0.5, color="#cc3311", label=f"{self.consumers} consumers")
        axes.set_xlabel("minimal repeat distance (calls)")
        axes.set_ylabel("keys")
        axes.set_title(f"repetition: {self.kind.value}, {self.calls} calls, {self.keys} keys")
        axes.legend()
        figure.savefig(path)


def repetition(keys: Iterable[str], consumers: int) -> Repetition:
    """Measure a log of keys, in the order in which their calls were made.

    Args:
        keys: one per call.
        consumers: how many calls run at a time: workers times concurrency.

    Raises:
        ValueError: `consumers` is less than 1.
    """
    if consumers < 1:
        raise ValueError(f"consumers = {consumers!r}: give how many calls run at a time, at least 1")
    last: dict[str, int] = {}
    shortest: dict[str, int] = {}
    calls = 0
    for calls, key in enumerate(keys, start=1):
        if key in last:
            distance = calls - last[key]
            shortest[key] = min(distance, shortest.get(key, distance))
        last[key] = calls
    close = sum(distance <= consumers for distance in shortest.values())
    if not shortest:
        kind = RepetitionKind.NONE
    else:
        kind = RepetitionKind.HIGH if 2 * close >= len(shortest) else RepetitionKind.SPARSE
    distances = dict(sorted(Counter(shortest.values()).items()))
    return Repetition(kind, consumers, calls, len(last), len(shortest), close, calls - len(last), distances)
