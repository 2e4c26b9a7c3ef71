"""All ratios beside the stock transport in one table, from the results that lie in a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import Report, Series, ratio, short


def summary(folder: Path) -> Report:
    """The table of ratios: median (min-max) of the rounds."""
    report = Report("ratios")
    report.header = ["what", "stock", "celery-dq", "celery-dq / stock"]
    report.notes.append(
        "medians with (min-max) of rounds that took turns; a ratio compares two rounds of one turn"
    )
    for what, stock, ours in _pairs(folder):
        report.row(what, stock, ours, ratio(ours, stock))
    return report


def _pairs(folder: Path) -> Iterator[tuple[str, Series, Series]]:
    def read(name: str) -> dict[str, Any]:
        path = folder / f"{name}.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def pair(row: dict[str, Any], quantity: str) -> tuple[Series, Series]:
        stock, ours = row.get("stock", {}), row.get("dq", {})
        return Series(stock.get(quantity, [])), Series(ours.get(quantity, []))

    for tenants, row in read("claims").items():
        yield f"claim + ack, {int(tenants):,} tenants, messages/s", *pair(row, "rate")
    for case, row in read("tasks").items():
        yield f"worker, no-op tasks/s, {case} acks", *pair(row, "rate")
    if publishing := read("publishing"):
        yield "apply_async/s, unbuffered", *pair(publishing, "rate")
    for pool, row in read("latency").items():
        for share in ("p50", "p99"):
            yield f"idle latency {share}, ms, {pool} (less is better)", *pair(row, share)
    for shape, row in read("memory").items():
        yield f"bytes per message, {shape} (less is better)", *pair(row, "bytes")
    commands = read("commands")
    for quantity in ("consume commands", "consume trips", "publish commands", "publish trips"):
        if {"stock", "dq"} <= set(commands):
            stock, ours = (Series([commands[name][quantity]]) for name in ("stock", "dq"))
            yield f"{quantity} per message (less is better)", stock, ours


def curve(data: dict[str, Any]) -> str:
    """The rate and Redis CPU at 60,000 tenants against 10, when both were measured."""
    if not {"10", "60000"} <= set(data) or "dq" not in data["10"]:
        return ""
    few, many = data["10"]["dq"], data["60000"]["dq"]
    rates = ratio(Series(many["rate"]), Series(few["rate"]))
    cpu = Series(many["cpu"]).median / Series(few["cpu"]).median
    return f"60,000 tenants against 10: rate {rates}, Redis CPU per message {short(cpu)}x"
