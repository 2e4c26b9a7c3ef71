"""Writes figures into README.rst and the guide: tables of results, and a picture by number of tenants."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.measure import Report
from benchmarks.plots import plot_claims
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

_BLOCK = re.compile(r"^\.\. ([a-z_]+)-start\n\n(.*?)^\.\. \1-end$", re.M | re.S)
_CLAIMS = re.compile(r"(?:claim \+ ack|dwell p99), ([0-9,]+) tenants?,")


def write_figures(folder: Path, readme: Path = README, guide: Path = GUIDE, figures: Path = FIGURES) -> None:
    """Replace the tables between the marks ``NAME-start`` and ``NAME-end``, and the picture.

    The name is that of a benchmark, or ``ratios``. A table or a ratio without a result in the folder stays.

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


def _replace_tables(file: Path, folder: Path, ratios: Report) -> None:
    def replaced(block: re.Match[str]) -> str:
        name, result = block[1], folder / f"{block[1]}.rst"
        if name == "ratios":
            rows = {row[0]: row for row in [*_rows_of(block[2]), *ratios.rows]}
            table = _with_rows(ratios, list(rows.values())).rst()
        elif result.exists():
            table = result.read_text()
        else:
            return block[0]
        return f".. {name}-start\n\n{table}\n.. {name}-end"

    file.write_text(_BLOCK.sub(replaced, file.read_text()))


def _rows_of(table: str) -> list[list[str]]:
    """Return the cells below the header of a table that :meth:`Report.rst` has made."""
    lines = table.splitlines()
    rules = [place for place, line in enumerate(lines) if line.startswith("==")]
    return [re.split(" {2,}", line) for line in lines[rules[1] + 1 : rules[2]]] if len(rules) == 3 else []


def headlines(ratios: Report) -> Report:
    """Return the table with the rows of the README only."""
    return _with_rows(ratios, [row for row in ratios.rows if row[0] in HEADLINES])


def few_of_the_curve(ratios: Report) -> Report:
    """Return the table without most of the points of the curve."""
    rows = [row for row in ratios.rows if not (at := _CLAIMS.match(row[0])) or at[1] in TENANTS]
    return _with_rows(ratios, rows)


def _with_rows(ratios: Report, rows: list[list[str]]) -> Report:
    return Report(ratios.name, ratios.notes, ratios.header, rows)
