"""The short run of :mod:`tests.producer.kills`; the long one is a program."""

from __future__ import annotations

from pathlib import Path

from celery_dq.testing.servers import RedisServer
from tests.producer.kills import Run, Verdict, judge


def test_nothing_accepted_is_lost_or_doubled_however_producers_die(tmp_path: Path) -> None:
    with RedisServer(appendonly=True) as server:
        verdict = Run(server, tmp_path, seed=11, processes=3).run(kills=30, seconds=40)
    assert verdict.clean, str(verdict)
    assert verdict.kills >= 10, str(verdict)
    assert verdict.accepted > 100, str(verdict)


def test_the_verdict_names_each_fault(tmp_path: Path) -> None:
    (tmp_path / "a.ledger").write_text("a-000001\na-000002\na-000003\n")
    good = judge(Verdict(), tmp_path, ["a-000001", "a-000002", "a-000003", "a-000004"])
    assert good.clean
    assert good.unnoted == 1
    assert judge(Verdict(), tmp_path, ["a-000001", "a-000003"]).lost == ["a-000002"]
    assert judge(Verdict(), tmp_path, ["a-000001", "a-000001~1"]).duplicated == ["a-000001~1"]
    assert judge(Verdict(), tmp_path, ["a-000002", "a-000001", "a-000003"]).disordered == ["a-000001"]
