"""A short run of the program that kills consumers."""

from __future__ import annotations

from tests.curator.kills import HELD, run


def test_killing_consumers_loses_nothing(hosts: str) -> None:
    verdict = run(hosts, items=600, kills=6, consumers=3, seed=7)
    assert verdict.lost == [], verdict
    assert verdict.twice <= verdict.kills * HELD, verdict
