"""Repetition, comparison and output, for all benchmarks."""

from __future__ import annotations

import functools
import gc
import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
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


Found = dict[str, dict[str, Series]]


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

    def fill_in(self, **values: object) -> None:
        """Fill the figures of this run into the notes."""
        self.notes = [note.format(**values) for note in self.notes]

    def compare(self, found: Found, base: str, quantities: str, *before: object) -> None:
        """Add a row for each contender, and all values to the data.

        Args:
            found: Contender -> quantity -> series.
            base: The contender with which the others are compared.
            quantities: Those of the cells, with ``|`` between them; ``vs QUANTITY`` is its ratio to `base`.
            before: The cells before the name of the contender. They name the case in the data.
        """
        for name, row in found.items():
            cells: list[object] = []
            for quantity in map(str.strip, quantities.split("|")):
                key = quantity.removeprefix("vs ")
                ours = row.get(key, Series())
                cells.append(ours if key == quantity else ratio(ours, found[base].get(key, Series())))
            self.row(*before, name, *cells)
        self.data.update({" ".join(map(str, before)): dump(found)} if before else dump(found))

    def text(self) -> str:
        lines = [f"== {self.name}", *self._aligned()]
        return "\n".join([*lines, *(f"   {note}" for note in self.notes)])

    def rst(self) -> str:
        """The same as a reST table."""
        head, *rows = self._aligned()
        rule = "  ".join("=" * width for width in self._widths())
        notes = "".join(f"{note[:1].upper()}{note[1:]}.\n" for note in self.notes)
        return "\n".join([rule, head, rule, *rows, rule, "", notes])

    def _widths(self) -> list[int]:
        table = [self.header, *self.rows]
        return [max(1, *(len(row[at]) for row in table if at < len(row))) for at in range(len(self.header))]

    def _aligned(self) -> list[str]:
        widths = self._widths()
        return [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
            for row in [self.header, *self.rows]
        ]


#: Name -> benchmark: called with `quick`, and with a part of the names of its cases if it has parts.
BENCHMARKS: dict[str, Callable[..., Report]] = {}


def benchmark(columns: str, notes: str = "") -> Callable[[Callable[..., None]], Callable[..., Report]]:
    """Make a benchmark of a function that fills its report; the function has the name of the benchmark.

    Args:
        columns: The header of the table, with ``|`` between the cells.
        notes: The method of measurement, a line for each note.
    """

    def decorate(fill: Callable[..., None]) -> Callable[..., Report]:
        @functools.wraps(fill)
        def run(quick: bool, *only: str) -> Report:
            header = [title.strip() for title in columns.split("|")]
            report = Report(fill.__name__, inspect.cleandoc(notes).splitlines(), header)
            fill(report, quick, *only)
            return report

        BENCHMARKS[fill.__name__] = run
        return run

    return decorate


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
) -> Found:
    """Run all contenders in turn, `rounds` times, so that a slow minute of the machine affects all of them.

    No new round begins after `budget` seconds. The figures of each run are printed when it ends, because a
    benchmark that is cut off prints no table. Return contender -> quantity -> series.
    """
    found: Found = {name: {} for name in contenders}
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


def steadily(rate: float, seconds: float) -> Iterator[int]:
    """Yield numbers at that rate; those that are late at once."""
    due = time.monotonic()
    for number in range(int(rate * seconds)):
        time.sleep(max(0.0, due - time.monotonic()))
        yield number
        due += 1 / rate


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of `values` lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else math.nan


def quantiles_ms(waits_s: Iterable[float]) -> dict[str, float]:
    """Return median, p99 and maximum of waits."""
    waits = [wait * 1e3 for wait in waits_s]
    return {"p50": percentile(waits, 0.5), "p99": percentile(waits, 0.99), "max": percentile(waits, 1)}


def jain(shares: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 for equal values, 1/n when only one value is not 0."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else math.nan


def dump(found: Found) -> dict[str, dict[str, list[float]]]:
    """Return a value in a form for JSON."""
    return {name: {key: series.values for key, series in row.items()} for name, row in found.items()}


class ServerProbe:
    """The counters of a Redis server, by INFO on a separate connection."""

    def __init__(self, port: int) -> None:
        self._client = redis.Redis(port=port)

    def info(self, section: str) -> Any:
        return self._client.info(section)

    def cpu_seconds(self) -> float:
        row = self.info("cpu")
        return float(row["used_cpu_user"] + row["used_cpu_sys"])

    def commands(self) -> float:
        """Return the number of commands that the server has executed, those inside scripts included."""
        return float(self.info("stats")["total_commands_processed"])

    def bytes_used(self) -> int:
        return int(self.info("memory")["used_memory"])

    def bytes_of_tenants(self) -> int:
        """Return the memory of all keys of partitions, except the state and the settings of a partition."""
        total = 0
        for key in self._client.scan_iter(match="dq:{*", count=1000):
            kind = key.partition(b"}:")[2].partition(b":")[0]
            if kind not in (b"state", b"leases", b"wake", b"quotas", b"quota_info", b"producer"):
                total += int(self._client.memory_usage(key, samples=0) or 0)
        return total

    def close(self) -> None:
        self._client.close()


@dataclass
class Spent:
    """The time of a block in seconds: by the clock, and of CPU."""

    wall_s: float = 0.0
    own_s: float = 0.0
    #: Of each server, and of the other processes together.
    redis_s: Sequence[float] = ()
    others_s: float = 0.0

    def per(self, amount: float) -> dict[str, float]:
        """Return the rate, and µs for each message: by the clock, of this process, of Redis, of others."""
        us = {"call": self.wall_s, "own": self.own_s, "cpu": sum(self.redis_s), "others": self.others_s}
        return {"rate": amount / self.wall_s, **{key: spent / amount * 1e6 for key, spent in us.items()}}


@contextmanager
def spending(*ports: int, pids: Iterable[int] = ()) -> Iterator[Spent]:
    """Measure the time of the block, and the CPU of Redis servers (by their ports) and other processes."""
    with ExitStack() as stack:
        probes = [stack.enter_context(closing(ServerProbe(port))) for port in ports]
        others = [psutil.Process(pid) for pid in pids]
        spent = Spent()
        redis_s, others_s = [probe.cpu_seconds() for probe in probes], _cpu_s(others)
        own_s, started = time.process_time(), time.perf_counter()
        yield spent
        spent.wall_s, spent.own_s = time.perf_counter() - started, time.process_time() - own_s
        spent.redis_s = [probe.cpu_seconds() - before for probe, before in zip(probes, redis_s, strict=True)]
        spent.others_s = _cpu_s(others) - others_s


def _cpu_s(processes: Iterable[psutil.Process]) -> float:
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))
