"""The table of all ratios to the stock transport, from the results in a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import Report, Series, ratio, short


class Pair(NamedTuple):
    """One quantity of both brokers."""

    what: str
    #: The benchmark that measures it.
    benchmark: str
    stock: Series
    ours: Series


def summary(folder: Path) -> Report:
    """The table of ratios: median (min-max) of the rounds."""
    report = Report("ratios")
    report.header = ["what", "Celery's Redis transport", "celery-dq", "ratio", "benchmark"]
    report.notes.append(
        "medians with (min-max) of rounds that took turns; a ratio compares two rounds of one turn"
    )
    for pair in _pairs(folder):
        if pair.stock.values and pair.ours.values:
            report.row(pair.what, pair.stock, pair.ours, ratio(pair.ours, pair.stock), pair.benchmark)
    return report


def _pairs(folder: Path) -> Iterator[Pair]:
    def read(name: str) -> dict[str, Any]:
        path = folder / f"{name}.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def pair(what: str, benchmark: str, row: dict[str, Any], quantity: str, ours: str = "dq") -> Pair:
        both = (Series(row.get(who, {}).get(quantity, [])) for who in ("stock", ours))
        return Pair(what, benchmark, *both)

    for tenants, row in read("claims").items():
        plural = "" if tenants == "1" else "s"
        many = f"{int(tenants):,} tenant{plural}"
        yield pair(f"claim + ack, {many}, messages/s", "claims", row, "rate")
        yield pair(f"dwell p99, {many}, ms (less is better)", "claims", row, "p99")
    for case, row in read("tasks").items():
        yield pair(f"worker, no-op tasks/s, {case} acks", "tasks", row, "rate")
    if row := read("buffering"):
        yield pair("``apply_async``, not buffered, calls/s", "buffering", row, "rate")
        yield pair("``apply_async``, buffered on disk, to the broker/s", "buffering", row, "rate", "buffered")
    for pool, row in read("latency").items():
        for share in ("p50", "p99"):
            what = f"idle latency {share}, {pool}, ms (less is better)"
            yield pair(what, "latency", row, share)
    for shape, row in read("memory").items():
        yield pair(f"bytes per message, {shape} (less is better)", "memory", row, "bytes")
    commands = {name: _listed(row) for name, row in read("commands").items()}
    for quantity in ("consume commands", "consume trips", "publish commands", "publish trips"):
        yield pair(f"{quantity} per message (less is better)", "commands", commands, quantity)


def _listed(row: dict[str, Any]) -> dict[str, list[float]]:
    return {key: [value] for key, value in row.items() if isinstance(value, float)}


def curve(data: dict[str, Any]) -> str:
    """The rate and Redis CPU at 60,000 tenants against 10, when both were measured."""
    if not {"10", "60000"} <= set(data) or "dq" not in data["10"]:
        return ""
    few, many = data["10"]["dq"], data["60000"]["dq"]
    rates = ratio(Series(many["rate"]), Series(few["rate"]))
    cpu = Series(many["cpu"]).median / Series(few["cpu"]).median
    return f"60,000 tenants against 10: rate {rates}, Redis CPU per message {short(cpu)}x"
