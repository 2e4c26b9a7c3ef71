"""The table of all ratios to the stock transport, from the results in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.measure import Report, Series, ratio, short


def summary(folder: Path) -> Report:
    """The table of ratios: median (min-max) of the rounds."""
    report = Report("ratios")
    report.header = ["what", "Celery's Redis transport", "celery-dq", "ratio", "benchmark"]
    report.notes.append(
        "medians with (min-max) of rounds that took turns; a ratio compares two rounds of one turn"
    )

    def read(name: str) -> dict[str, Any]:
        path = folder / f"{name}.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def add(what: str, benchmark: str, row: dict[str, Any], quantity: str, who: str = "dq") -> None:
        stock, ours = (Series(row.get(each, {}).get(quantity, [])) for each in ("stock", who))
        if stock.values and ours.values:
            report.row(what, stock, ours, ratio(ours, stock), benchmark)

    for tenants, row in read("claims").items():
        many = f"{int(tenants):,} tenant{'' if tenants == '1' else 's'}"
        add(f"claim + ack, {many}, messages/s", "claims", row, "rate")
        add(f"dwell p99, {many}, ms (less is better)", "claims", row, "p99")
    for case, row in read("tasks").items():
        add(f"worker, no-op tasks/s, {case} acks", "tasks", row, "rate")
    if row := read("buffering"):
        add("``apply_async``, not buffered, calls/s", "buffering", row, "rate")
        add("``apply_async``, buffered on disk, to the broker/s", "buffering", row, "rate", "buffered")
    for pool, row in read("latency").items():
        for share in ("p50", "p99"):
            add(f"idle latency {share}, {pool}, ms (less is better)", "latency", row, share)
    for shape, row in read("memory").items():
        add(f"bytes per message, {shape} (less is better)", "memory", row, "bytes")
    commands = {who: {key: [value] for key, value in row.items()} for who, row in read("commands").items()}
    for quantity in ("consume commands", "consume trips", "publish commands", "publish trips"):
        add(f"{quantity} per message (less is better)", "commands", commands, quantity)
    return report


def curve(data: dict[str, Any]) -> str:
    """The rate and Redis CPU at 60,000 tenants against 10, when both were measured."""
    if not {"10", "60000"} <= set(data) or "dq" not in data["10"]:
        return ""
    few, many = data["10"]["dq"], data["60000"]["dq"]
    rates = ratio(Series(many["rate"]), Series(few["rate"]))
    cpu = Series(many["cpu"]).median / Series(few["cpu"]).median
    return f"60,000 tenants against 10: rate {rates}, Redis CPU per message {short(cpu)}x"
