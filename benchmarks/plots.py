"""Curves as PNG."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

CURVES = {
    "rate": "claimed and acknowledged, messages/s",
    "cpu": "Redis CPU, µs per message",
    "memory": "bytes per waiting message",
    "idle": "bytes per idle tenant",
    "p99": "dwell p99 at the same rate, ms",
    "quota": "worst error of a rate, %",
}


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
