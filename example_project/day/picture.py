"""The picture: each notice of the day as a dot, and the percentiles. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from day.director import Day
from day.judge import Delays, by_class, by_kind
from day.plan import CLOSES, FAILING, FLASH, FLASH_SALE_AT, HANGING, OPENS, QUIET, SLOW, clock, seconds

COLOURS = {QUIET: "#4c78a8", FLASH: "#f2a541", SLOW: "#8e6c9f", HANGING: "#c8553d", FAILING: "#7a5c43"}
BROKER_COLOURS = {"dq": "#1b7f79", "stock": "#8a8a8a"}
MARKERS = (("p50", "o"), ("p95", "s"), ("p99", "D"), ("max", "|"))
FLOOR = 0.001
"""Shortest delay that the axes show, in seconds."""


def draw(days: Sequence[Day], minutes: float, about: str, png: Path) -> str:
    """Draw the picture into a PNG file. Return it as SVG for a page."""
    figure = Figure(figsize=(14, 10), layout="constrained")
    figure.suptitle(f"Delivery delay of a day's notices ({about})", fontsize=14)
    top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=(1.15, 1))[:, 0]
    dots = top.subplots(1, len(days), sharey=True, squeeze=False)[0]
    for axes, day in zip(dots, days, strict=True):
        _dots(axes, day, days, minutes)
    dots[0].set_ylabel("delay in seconds")
    handles = [
        Line2D([], [], marker="o", linestyle="", color=colour, label=name) for name, colour in COLOURS.items()
    ]
    top.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    left, right = bottom.subplots(1, 2)
    _ranges(left, "per class of merchant", days, [by_class(day.samples) for day in days])
    _ranges(right, "per priority", days, [by_kind(day.samples) for day in days])
    handles = [
        Line2D([], [], marker=marker, linestyle="", color="#333333", label=name) for name, marker in MARKERS
    ] + [
        Line2D([], [], linewidth=3, color=BROKER_COLOURS[day.broker.name], label=day.broker.title)
        for day in days
    ]
    bottom.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(png, dpi=110)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", dpi=150)
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def _dots(axes: Axes, day: Day, days: Sequence[Day], minutes: float) -> None:
    for name, colour in COLOURS.items():
        known = [
            (each.at, each.delay)
            for each in day.samples
            if each.merchant_class == name and each.delay is not None
        ]
        axes.scatter(
            [at for at, _ in known],
            [max(FLOOR, delay) for _, delay in known],
            s=5 if name in (QUIET, FLASH) else 14,
            color=colour,
            alpha=0.55 if name in (QUIET, FLASH) else 0.9,
            linewidths=0,
            zorder=2 if name == FLASH else 3,
            rasterized=True,
        )
    verdict = day.verdict
    axes.set_title(
        f"{day.broker.title}: "
        f"{verdict.missing} missing ({verdict.lost} lost), {verdict.duplicates} duplicates",
        color=BROKER_COLOURS[day.broker.name],
        fontweight="bold",
    )
    axes.set_yscale("log")
    axes.set_ylim(FLOOR, _longest(days))
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    axes.set_xlim(0, minutes * 60)
    axes.set_xticks([seconds(hour, minutes) for hour in range(int(OPENS), int(CLOSES) + 1, 3)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: clock(at, minutes)))
    axes.grid(alpha=0.25)
    for at, label, share in (
        (seconds(FLASH_SALE_AT, minutes), "flash sale", 0.97),
        (day.kill_at, "kill -9", 0.91),
    ):
        axes.axvline(at, color="#222222", linewidth=1, linestyle=":", zorder=4)
        axes.text(at, share, f" {label}", transform=axes.get_xaxis_transform(), va="top", fontsize=9)


def _ranges(axes: Axes, title: str, days: Sequence[Day], groups: Sequence[Sequence[Delays]]) -> None:
    step = 0.8 / len(days)
    for number, (day, rows) in enumerate(zip(days, groups, strict=True)):
        colour = BROKER_COLOURS[day.broker.name]
        for place, row in enumerate(rows):
            if row.count == row.unheard:
                continue
            y = place + (number - (len(days) - 1) / 2) * step
            axes.plot(
                [max(FLOOR, row.p50), row.max],
                [y, y],
                color=colour,
                linewidth=3,
                solid_capstyle="butt",
                alpha=0.6,
            )
            for name, marker in MARKERS:
                axes.plot(
                    max(FLOOR, getattr(row, name)),
                    y,
                    marker=marker,
                    color=colour,
                    markersize=6 if marker != "|" else 12,
                )
    axes.set_title(title)
    axes.set_yticks(range(len(groups[0])), [f"{row.group} ({row.count:,})" for row in groups[0]])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(FLOOR, _longest(days))
    axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    axes.set_xlabel("delay in seconds")
    axes.grid(axis="x", alpha=0.25)


def _longest(days: Sequence[Day]) -> float:
    """Return the end of the delay axes in seconds. All axes are equal, so that they can be compared."""
    return 1.5 * max(20.0, *(each.delay or 0.0 for day in days for each in day.samples))


def _plain(value: float, _: float) -> str:
    return f"{value:g}"
