"""Puts figures into README.rst: the table of ratios, and the curve by tenant count as a small picture."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.measure import Report
from benchmarks.plots import plot_claims
from benchmarks.summary import summary

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.rst"
FIGURES = ROOT / "docs" / "figures"

#: Claims at these numbers of tenants; the curve shows the others.
TENANTS = ("1", "10", "1,000", "60,000")

_BLOCK = re.compile(r"(?<=^\.\. ratios-start\n\n).*?(?=^\.\. ratios-end$)", re.M | re.S)
_CLAIMS = re.compile(r"claim \+ ack, ([0-9,]+) tenants?,")


def show_in_readme(folder: Path, readme: Path = README, figures: Path = FIGURES) -> None:
    """Replace what stands between the marks ``ratios-start`` and ``ratios-end``, and the picture.

    Raises ValueError when `folder` has no results, or the README no marks.
    """
    text = readme.read_text()
    ratios = short_table(summary(folder))
    if not ratios.rows or not _BLOCK.search(text):
        raise ValueError(f"no results of benchmarks in {folder}, or no marks in {readme}")
    readme.write_text(_BLOCK.sub(lambda _: f"{ratios.rst()}\n", text))
    claims = folder / "claims.json"
    if claims.exists():
        figures.mkdir(exist_ok=True)
        plot_claims(json.loads(claims.read_text()), figures / "tenants.png", dpi=72)


def short_table(ratios: Report) -> Report:
    """The table without most of the points of the curve."""
    rows = [row for row in ratios.rows if not (at := _CLAIMS.match(row[0])) or at[1] in TENANTS]
    return Report(ratios.name, ratios.notes, ratios.header, rows)
