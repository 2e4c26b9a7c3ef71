"""Writes figures into README.rst and the guide: tables of results, and a picture by number of tenants."""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measure import Report
from benchmarks.summary import summary

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.rst"
GUIDE = ROOT / "docs" / "guides" / "benchmarks-and-faults.rst"
FIGURES = ROOT / "docs" / "figures"

#: The rows of the README. The guide has the others as well.
HEADLINES = (
    "claim + ack, 10 tenants, messages/s",
    "claim + ack, 60,000 tenants, messages/s",
    "worker, no-op tasks/s, prefork early acks",
    "``apply_async``, buffered on disk, to the broker/s",
    "idle latency p50, prefork, ms (less is better)",
    "bytes per message, 1,000 tenants x 100 (less is better)",
)
#: The numbers of tenants for which the guide has a row. The curve shows the others.
TENANTS = ("1", "10", "1,000", "60,000")

#: Benchmarks of which a part can be measured -> the number of columns that name a row of their tables.
PARTS = {"claims": 2, "trickle": 3, "many_queues": 2, "many_quotas": 3}

#: Quantity of ``claims`` -> title of its curve.
CURVES = {
    "rate": "claimed and acknowledged, messages/s",
    "cpu": "Redis CPU, µs per message",
    "memory": "bytes per waiting message",
    "idle": "bytes per idle tenant",
    "p99": "dwell p99 at the same rate, ms",
    "quota": "worst error of a rate, %",
}

_BLOCK = re.compile(r"^\.\. ([a-z_]+)-start\n\n(.*?)^\.\. \1-end$", re.M | re.S)
_CLAIMS = re.compile(r"(?:claim \+ ack|dwell p99), ([0-9,]+) tenants?,")


def write_figures(folder: Path, readme: Path = README, guide: Path = GUIDE, figures: Path = FIGURES) -> None:
    """Replace the tables between the marks ``NAME-start`` and ``NAME-end``, and the picture.

    The name is that of a benchmark, or ``ratios``. A table or a ratio without a result in the folder stays.
    The rows of a part of a benchmark replace those of the same cases; the others stay.

    Args:
        folder: The results of benchmarks.
        readme: Gets the rows of :data:`HEADLINES`.
        guide: Gets all ratios, but few of the curve, and the tables of benchmarks.
        figures: The folder of the picture.

    Raises:
        ValueError: `folder` has no results, or one of the files has no marks.
    """
    ratios = summary(folder)
    tables = {readme: headlines(ratios), guide: few_of_the_curve(ratios)}
    for file in tables:
        if not any(folder.glob("*.json")) or "ratios" not in marked(file.read_text()):
            raise ValueError(f"no results of benchmarks in {folder}, or no marks in {file}")
    for file, table in tables.items():
        _replace_tables(file, folder, table)
    claims = folder / "claims.json"
    if claims.exists():
        figures.mkdir(exist_ok=True)
        plot_claims(json.loads(claims.read_text()), figures / "tenants.png", dpi=72)


def marked(text: str) -> dict[str, str]:
    """Return the tables between marks by their names."""
    return {block[1]: block[2] for block in _BLOCK.finditer(text)}


def part_of(name: str, only: str) -> str:
    """Return the name of the files of a part of a benchmark."""
    return f"{name}-part-{re.sub('[^a-z0-9]+', '-', only.lower()).strip('-')}"


def _replace_tables(file: Path, folder: Path, ratios: Report) -> None:
    def replaced(block: re.Match[str]) -> str:
        name = block[1]
        results = [*folder.glob(f"{name}.rst"), *folder.glob(f"{name}-part-*.rst")]
        if name == "ratios":
            rows = {row[0]: row for row in [*_rows_of(block[2]), *ratios.rows]}
            table = replace(ratios, rows=list(rows.values())).rst()
        elif results:
            table = block[2]
            for result in sorted(results, key=lambda file: file.stat().st_mtime_ns):
                is_part = result.stem != name
                table = _with_part(table, result.read_text(), PARTS[name]) if is_part else result.read_text()
        else:
            return block[0]
        return f".. {name}-start\n\n{table}\n.. {name}-end"

    file.write_text(_BLOCK.sub(replaced, file.read_text()))


def _rows_of(table: str) -> list[list[str]]:
    """Return the cells below the header of a table that :meth:`Report.rst` has made."""
    lines = table.splitlines()
    rules = _rules(lines)
    return [re.split(" {2,}", line) for line in lines[rules[1] + 1 : rules[2]]] if len(rules) == 3 else []


def _with_part(table: str, part: str, keys: int) -> str:
    """Return the table with the rows of a part, whose first `keys` cells name the rows that they replace.

    A table with other columns is replaced by the part.
    """
    header, notes = _header_of(part), part.splitlines()
    notes = [line.removesuffix(".") for line in notes[_rules(notes)[2] + 1 :] if line]
    old = _rows_of(table) if _header_of(table) == header else []
    rows = {tuple(row[:keys]): row for row in [*old, *_rows_of(part)]}
    return Report("", notes, header, list(rows.values())).rst()


def _rules(lines: list[str]) -> list[int]:
    return [place for place, line in enumerate(lines) if line.startswith("=")]


def _header_of(table: str) -> list[str]:
    lines = table.splitlines()
    rules = _rules(lines)
    return re.split(" {2,}", lines[rules[0] + 1]) if rules else []


def headlines(ratios: Report) -> Report:
    """Return the table with the rows of the README only."""
    return replace(ratios, rows=[row for row in ratios.rows if row[0] in HEADLINES])


def few_of_the_curve(ratios: Report) -> Report:
    """Return the table without most of the points of the curve."""
    rows = [row for row in ratios.rows if not (at := _CLAIMS.match(row[0])) or at[1] in TENANTS]
    return replace(ratios, rows=rows)


def plot_claims(data: dict[str, Any], path: Path, dpi: int = 110) -> None:
    """Draw the curve by tenant count into the file `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 6.4))
    tenants = sorted((int(key) for key in data), key=int)
    for axis, (quantity, title) in zip(axes.flat, CURVES.items(), strict=True):
        highest = 1.0
        for number, name in enumerate(data[str(tenants[0])]):
            rows = [data[str(point)][name].get(quantity, [math.nan]) for point in tenants]
            middle = [statistics.median(row) for row in rows]
            if all(math.isnan(value) for value in middle):
                continue
            highest = max(highest, 1.05 * max(max(row) for row in rows))
            colour = f"C{number}"
            axis.plot(tenants, middle, marker="o", label=name, color=colour)
            lows, highs = [min(row) for row in rows], [max(row) for row in rows]
            axis.fill_between(tenants, lows, highs, alpha=0.2, color=colour)
        axis.set_xscale("log")
        axis.set_ylim(0, highest)
        axis.set_xlabel("tenants")
        axis.set_title(title)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)
