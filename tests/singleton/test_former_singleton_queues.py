"""A queue that is taken out of ``dq_singleton_queues`` is an ordinary queue once its leader is forgotten."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import celery_dq
from celery_dq.app.checks.doctor import check_server, read_status
from celery_dq.errors import InvalidRequest
from celery_dq.testing.waiting import wait_until
from tests.singleton.posting_app import QUEUE
from tests.singleton.posting_workers import DEADLINE_S, PostingWorkers
from tests.workers import make_app

LEASE_S = 1


def test_a_former_singleton_queue_is_consumed_by_any_worker(
    open_posting: Callable[..., PostingWorkers], election: str
) -> None:
    posting = open_posting(election=election, dq_lease=LEASE_S)
    dq = posting.app.dq  # type: ignore[attr-defined]  # of `setup`
    with posting.worker():
        posting.post(range(1))
        posting.finished(1)
        with pytest.raises(InvalidRequest, match="stop the workers that have it in dq_singleton_queues"):
            dq.leaders.forget(QUEUE)
    (token,) = {entry.token for entry in posting.book.entries("finish")}
    conf = {**posting.conf, "dq_singleton_queues": []}
    changed = make_app("changed", posting.broker, conf)
    celery_dq.setup(changed)
    posting.send("nothing")
    with posting.worker(conf=conf) as ordinary:
        ordinary.wait_for_log(f"celery dq leaders {QUEUE} --forget", DEADLINE_S)
        assert dq.explain(tenant="", queue=QUEUE).reason == "no-leader"
        (finding,) = (each for each in check_server(changed) if each.code == "W036")
        assert f"celery dq leaders {QUEUE} --forget" in finding.remedy
        assert any(f"leaders {QUEUE} --forget" in each.remedy for each in read_status(changed).findings)
        assert dq.leaders.forget(QUEUE)
        wait_until(lambda: not dq.queues[QUEUE].depth, DEADLINE_S, what="the ordinary worker to look again")
        posting.send("nothing")
        wait_until(lambda: not dq.queues[QUEUE].depth, DEADLINE_S, what="the ordinary worker to be woken")
    assert QUEUE not in changed.dq.leaders.known()  # type: ignore[attr-defined]  # of `setup`
    assert not dq.leaders.forget(QUEUE)
    assert [each for each in check_server(changed) if each.code == "W036"] == []
    with posting.worker():
        posting.post(range(1, 2))
        posting.finished(2)
    assert max(entry.token for entry in posting.book.entries("finish")) > token
