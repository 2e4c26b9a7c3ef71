"""Repetition, comparison and output, for all benchmarks."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis


@dataclass
class Series:
    """Figures of one quantity over the rounds."""

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values) if self.values else math.nan

    def __str__(self) -> str:
        if not self.values or math.isnan(self.median):
            return "-"
        if len(self.values) == 1:
            return short(self.median)
        return f"{short(self.median)} ({short(min(self.values))}-{short(max(self.values))})"


@dataclass
class Report:
    """The results of a benchmark: rows to print, and data for JSON."""

    name: str
    #: One line per table, with the method of measurement.
    notes: list[str] = field(default_factory=list)
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def row(self, *cells: object) -> None:
        self.rows.append([str(cell) for cell in cells])

    def text(self) -> str:
        table = [self.header, *self.rows]
        widths = [
            max(len(row[index]) for row in table if index < len(row)) for index in range(len(self.header))
        ]
        lines = [f"== {self.name}"]
        for row in table:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, *(f"   {note}" for note in self.notes)])

    def rst(self) -> str:
        """The same as a reST table."""
        table = [self.header, *self.rows]
        widths = [max(1, *(len(row[at]) for row in table if at < len(row))) for at in range(len(self.header))]
        rule = "  ".join("=" * width for width in widths)
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
            for row in table
        ]
        notes = "".join(f"{note[:1].upper()}{note[1:]}.\n" for note in self.notes)
        return "\n".join([rule, lines[0], rule, *lines[1:], rule, "", notes])


def short(value: float) -> str:
    """Return a number with three significant digits."""
    if math.isnan(value):
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def ratio(ours: Series, theirs: Series) -> str:
    """Return the ratios of two series by round: median (min-max)."""
    pairs = [a / b for a, b in zip(ours.values, theirs.values, strict=False) if b]
    return f"{Series(pairs)}x" if pairs else "-"


class UnknownCaseError(ValueError):
    """A benchmark has no case of this name."""


def chosen(cases: Sequence[str], only: str) -> list[str]:
    """Return the cases whose names contain `only`.

    Raises:
        UnknownCaseError: There is none.
    """
    found = [case for case in cases if only in case]
    if not found:
        raise UnknownCaseError(f"no case contains {only!r}: choose from {'; '.join(cases)}")
    return found


def interleave(
    contenders: Sequence[str], rounds: int, measure: Callable[[str], dict[str, float]], budget: float
) -> dict[str, dict[str, Series]]:
    """Run all contenders in turn, `rounds` times, so that a slow minute of the machine affects all of them.

    No new round begins after `budget` seconds. The figures of each run are printed when it ends, because a
    benchmark that is cut off prints no table. Return contender -> quantity -> series.
    """
    found: dict[str, dict[str, Series]] = {name: {} for name in contenders}
    started = time.monotonic()
    for number in range(rounds):
        if number and time.monotonic() - started > budget:
            break
        # The order is reversed in every second round.
        for name in contenders if number % 2 == 0 else list(reversed(contenders)):
            gc.collect()
            figures = measure(name)
            for quantity, value in figures.items():
                found[name].setdefault(quantity, Series()).values.append(value)
            print_progress(f"round {number + 1}, {name}", figures)
    return found


def print_progress(what: str, figures: Mapping[str, float]) -> None:
    """Print the figures of one run at once."""
    print(f"   {what}:", ", ".join(f"{key} {short(value)}" for key, value in figures.items()), flush=True)


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of `values` lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else math.nan


def jain(shares: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 for equal values, 1/n when only one value is not 0."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else math.nan


def dump(found: dict[str, dict[str, Series]]) -> dict[str, dict[str, list[float]]]:
    """Return a value in a form for JSON."""
    return {name: {key: series.values for key, series in row.items()} for name, row in found.items()}


class ServerProbe:
    """CPU and memory of a Redis server, by INFO on a separate connection."""

    def __init__(self, port: int) -> None:
        self._client = redis.Redis(port=port)

    def cpu_seconds(self) -> float:
        row = self._client.info("cpu")
        return float(row["used_cpu_user"] + row["used_cpu_sys"])

    def bytes_used(self) -> int:
        return int(self._client.info("memory")["used_memory"])

    def bytes_of_tenants(self) -> int:
        """Return the memory of all keys of partitions, except the state and the settings of a partition."""
        total = 0
        for key in self._client.scan_iter(match="dq:{*", count=1000):
            kind = key.partition(b"}:")[2].partition(b":")[0]
            if kind not in (b"state", b"leases", b"wake", b"quotas", b"quota_info", b"producer"):
                total += int(self._client.memory_usage(key, samples=0) or 0)
        return total

    def flush(self) -> None:
        self._client.flushall()

    def close(self) -> None:
        self._client.close()
