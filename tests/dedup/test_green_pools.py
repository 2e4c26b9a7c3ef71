"""Dedup in workers without an event loop, whose pools switch between greenlets."""

from __future__ import annotations

import pytest

from tests.dedup.dedup_workers import DedupWorkers


@pytest.mark.parametrize("dedup_workers", ["dq-redis", "redis"], indirect=True)
@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_one_runs_one_waits_and_goes_on_when_the_first_has_ended(
    dedup_workers: DedupWorkers, pool: str
) -> None:
    # Long enough that a call that is not woken at once is late.
    dedup_workers.conf["dq_lease"] = 30.0
    worker = dedup_workers.worker(pool=pool).wait_ready()
    results = [dedup_workers.send("early", 1)]
    dedup_workers.ran(1)
    results += [dedup_workers.send("early", version) for version in (2, 3, 4)]
    # Waiting calls hold no slot of the pool: another key runs at once.
    other = dedup_workers.app.tasks["early"].apply_async((2, 9))
    dedup_workers.ran(2)
    dedup_workers.witness.rpush("door:2", "go")
    assert other.get(timeout=40) == [2, 9]
    dedup_workers.open(2)
    assert [result.get(timeout=40) for result in results] == [[1, 1], [1, 2], [1, 2], [1, 2]]
    assert dedup_workers.ran(3) == ["1", "9", "2"]
    assert dedup_workers.meetings() == 0
    assert "Traceback" not in worker.log
