"""The report: the table, the verdict as text, the data as JSON, and the page with all of them."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from day import picture
from day.director import Day, Options
from day.judge import Delays, Verdict, by_class, by_kind
from day.plan import CLASSES

COLUMNS = ("p50", "p95", "p99", "max")


def sections(day: Day) -> list[tuple[str, list[Delays]]]:
    """Return the parts of the table for one day: title and rows."""
    return [("per class of merchant", by_class(day.samples)), ("per priority", by_kind(day.samples))]


def seconds(value: float) -> str:
    """Write a delay: ``0.012``, ``3.4``, ``17``, or a dash for none."""
    if math.isnan(value):
        return "-"
    return f"{value:.3f}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def text(days: Sequence[Day], options: Options) -> str:
    """Return the table and the verdicts for a terminal."""
    width = 8 * len(COLUMNS) + 9
    lines = ["", f"A day of the shop: {about(options)}"]
    lines.append(
        "Delivery delay in seconds, from publishing a notice to the first request at the merchant's endpoint:"
    )
    lines.append(" " * 24 + "".join(f"  {day.broker.title:^{width}}" for day in days))
    head = "".join(f"{column:>8}" for column in COLUMNS) + f"{'unheard':>9}"
    for part, (title, first) in enumerate(sections(days[0])):
        lines.append(f"{title:<24}" + f"  {head}" * len(days))
        for row, summary in enumerate(first):
            cells = [sections(day)[part][1][row] for day in days]
            name = f"  {summary.group} ({summary.count:,})"
            lines.append(f"{name:<24}" + "".join(f"  {_cells(cell)}" for cell in cells))
    lines += ["(unheard: not one request reached the endpoint within the run)", ""]
    for day in days:
        lines += [f"The ledger on {day.broker.title}: {verdict(day.verdict)} {lateness(day)}"]
    return "\n".join(lines)


def _cells(row: Delays) -> str:
    values = "".join(f"{seconds(getattr(row, column)):>8}" for column in COLUMNS)
    return f"{values}{row.unheard or '-':>9}"


def about(options: Options) -> str:
    """Return a description of the day."""
    return f"seed {options.seed}, {options.merchants:,} merchants, {options.minutes:g} min a day"


def verdict(of_day: Verdict) -> str:
    """Return a verdict as text."""
    counts = (
        f"{of_day.published:,} published, {of_day.delivered:,} delivered, {of_day.given_up:,} given up "
        f"after the last attempt, {of_day.retries:,} retries; lost {of_day.lost:,}, "
        f"duplicates {of_day.duplicates:,}"
    )
    sentences = [counts]
    if of_day.duplicates:
        reasons = [
            (of_day.duplicates_by_kill, "in the killed worker's hands"),
            (of_day.duplicates_by_timeout, "answered too late"),
            (of_day.duplicates_unexplained, "without a reason"),
        ]
        sentences.append(f" ({', '.join(f'{count} {why}' for count, why in reasons if count)})")
    sentences.append(".")
    if of_day.held_in_all:
        again = of_day.held_in_all - of_day.held
        sentences.append(
            f" In the dead worker's name the broker keeps {of_day.held_in_all:,} until visibility_timeout "
            f"(1 h): {of_day.held:,} not delivered within the run, {again:,} that will be delivered again."
        )
    if of_day.queued:
        sentences.append(f" {of_day.queued:,} still in the queue when the run ended.")
    return "".join(sentences)


def lateness(day: Day) -> str:
    """Return a text about how late the shop was."""
    return f"Publishing was {seconds(day.lag)} s behind the plan at worst."


def data(days: Sequence[Day], options: Options) -> dict[str, Any]:
    """Return all data for JSON; NaN becomes None."""
    return {
        "seed": options.seed,
        "merchants": options.merchants,
        "minutes": options.minutes,
        "days": {
            day.broker.name: {
                "verdict": day.verdict.as_dict(),
                "kill_at": round(day.kill_at, 3),
                "drained_at": round(day.drained_at, 3),
                "lag": round(day.lag, 3),
                "wall": round(day.wall, 3),
                "delays": {
                    title: [{key: _plain(value) for key, value in asdict(row).items()} for row in rows]
                    for title, rows in sections(day)
                },
            }
            for day in days
        },
    }


def _plain(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return None if math.isnan(value) else round(value, 4)


def save(days: Sequence[Day], options: Options) -> list[Path]:
    """Write the picture and the page; return their paths."""
    png, page = options.out / "day.png", options.out / "day.html"
    svg = picture.draw(days, options.minutes, about(options), png)
    page.write_text(_page(days, options, svg), encoding="utf-8")
    return [png, page]


def _page(days: Sequence[Day], options: Options, svg: str) -> str:
    verdicts = "".join(
        f"<p class='{'good' if day.verdict.clean else 'bad'}'><b>{html.escape(day.broker.title)}.</b> "
        f"{html.escape(verdict(day.verdict))} {lateness(day)}</p>"
        for day in days
    )
    classes = "".join(f"<li><b>{each.name}</b>: {html.escape(each.what)}</li>" for each in CLASSES.values())
    return _PAGE.format(
        about=html.escape(about(options)), svg=svg, verdicts=verdicts, table=_table(days), classes=classes
    )


def _table(days: Sequence[Day]) -> str:
    rows = ["<tr><th></th><th></th>"]
    rows += [f"<th colspan='{len(COLUMNS) + 1}'>{html.escape(day.broker.title)}</th>" for day in days]
    rows.append("</tr>")
    head = "".join(f"<th>{column}</th>" for column in (*COLUMNS, "unheard"))
    for part, (title, first) in enumerate(sections(days[0])):
        rows.append(f"<tr class='head'><th>{title}</th><th>notices</th>{head * len(days)}</tr>")
        for row, summary in enumerate(first):
            rows.append(f"<tr><th>{summary.group}</th><td>{summary.count:,}</td>")
            for day in days:
                cell = sections(day)[part][1][row]
                rows += [f"<td>{seconds(getattr(cell, column))}</td>" for column in COLUMNS]
                rows.append(f"<td>{cell.unheard or '-'}</td>")
            rows.append("</tr>")
    return "".join(rows)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>A day of the shop</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; }}
body {{ max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }}
svg {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
td, th {{ padding: .2rem .7rem; text-align: right; font-weight: normal; }}
th:first-child {{ text-align: left; }}
tr:first-child th {{ text-align: center; font-weight: bold; }}
tr.head th {{ border-top: 1px solid #999; color: #666; }}
p.good {{ border-left: 4px solid #1b7f79; padding-left: .8rem; }}
p.bad {{ border-left: 4px solid #c8553d; padding-left: .8rem; }}
</style></head><body>
<h1>A day of the shop</h1>
<p>Delivery delay in seconds, from publishing a notice to the first request at its endpoint ({about}).
<i>Unheard</i> are notices of which no endpoint got a request within the run.
One worker of two is killed on the way, and replaced.</p>
{svg}
<h2>The ledger's verdict</h2>
{verdicts}
<h2>The figures</h2>
<table>{table}</table>
<h2>The classes of merchants</h2>
<ul>{classes}</ul>
</body></html>
"""
