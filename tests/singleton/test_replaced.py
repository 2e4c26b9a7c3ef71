"""Each callable that celery-dq replaces in a worker accepts every call that the original accepts."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.singleton.posting_workers import DEADLINE_S, PostingWorkers

EVERYWHERE = {
    "app.send_task",
    "control.broadcast",
    "amqp._create_task_sender",
    "task.__trace__",
    "consumer.create_task_handler",
    "worker._process_task",
    "pool.apply_async",
}


@pytest.fixture
def posting(
    request: pytest.FixtureRequest,
    open_posting: Callable[..., PostingWorkers],
    redis_server: RedisServer,
    broker: str,
    pool: str,
) -> PostingWorkers:
    """A posting app with dedup locks on a broker, with keys of its own."""
    options = {"election": "" if broker == "dq" else redis_server.url(0), "dq_dedup_url": redis_server.url(0)}
    if broker == "zookeeper":
        options["broker_url"] = f"dq-zookeeper://{request.getfixturevalue('hosts')}"
    return open_posting(broker=broker, dq_key_prefix=f"t{uuid.uuid4().hex[:8]}", **options)


@pytest.mark.parametrize(
    ("broker", "pool", "expected"),
    [
        ("dq", "prefork", {"job._timeout_callback", "children._track_child_process"}),
        ("dq", "threads", {"pool.on_stop", "request.cancel"}),
        ("stock", "prefork", {"job._timeout_callback", "job._accept_callback", "pool.flush", "message.ack"}),
        ("zookeeper", "prefork", {"job._error_callback", "job._callback", "consumer.add_task_queue"}),
    ],
)
def test_replacements_accept_the_arguments_of_the_originals(
    posting: PostingWorkers, pool: str, expected: set[str]
) -> None:
    with posting.worker(pool=pool) as worker:
        posting.send("hold_keyed", 1)
        posting.wait_started(1)
        answer: Any = wait_until(
            lambda: posting.app.control.broadcast("replaced", reply=True, timeout=5, limit=1), DEADLINE_S
        )
        posting.book.release("1")
        posting.finished(1)
    refused = answer[0][worker.name]
    assert [f"{name}: {call}" for name, calls in refused.items() for call in calls] == []
    assert EVERYWHERE | expected <= set(refused)


@pytest.mark.parametrize(
    ("broker", "pool"),
    [
        ("dq", "prefork"),
        ("dq", "gevent"),
        ("stock", "prefork"),
        ("stock", "gevent"),
        ("zookeeper", "prefork"),
    ],
)
def test_the_replacements_take_the_calls_of_celery_and_billiard(posting: PostingWorkers, pool: str) -> None:
    """Each end of a task with a dedup key in a singleton queue, whose callbacks are wrapped most often.

    billiard passes the arguments of a timeout by keyword, gevent's pool by position. The next task with the
    same key shows that each callback came to its end.
    """
    with posting.worker(pool, 1) as worker:
        posting.leader()
        ends: list[tuple[str, dict[str, float], type[BaseException]]] = [
            ("fail_keyed", {}, LookupError),
            ("hold_keyed", {"time_limit": 1}, TimeLimitExceeded),
        ]
        if pool == "prefork":
            ends.append(("hold_keyed", {"soft_time_limit": 1}, SoftTimeLimitExceeded))
        for task, limits, error in ends:
            result = posting.send(task, 1, **limits)
            with pytest.raises(error):
                result.get(timeout=30)
        last = posting.send("hold_keyed", 1)
        posting.wait_started(1, len(ends) + 1)
        posting.book.release("1", len(ends) + 1)
        last.get(timeout=DEADLINE_S)
        assert "Pool callback raised" not in worker.log
        assert "TypeError" not in worker.log
