"""When a worker knows that it is to stop."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from celery.worker import state

from celery_dq.testing.waiting import wait_until
from celery_dq.worker.gate import Gate
from celery_dq.worker.stopping import terminates
from tests.broker.yard import Yard


@pytest.mark.parametrize(
    ("flag", "value", "closing"),
    [
        ("should_stop", None, False),
        ("should_stop", False, False),
        # what Celery's handler of SIGTERM leaves: the exit code
        ("should_stop", 0, True),
        ("should_stop", True, True),
        ("should_terminate", 0, True),
    ],
)
def test_a_worker_closes_with_whatever_celery_leaves(
    monkeypatch: pytest.MonkeyPatch, flag: str, value: Any, closing: bool
) -> None:
    monkeypatch.setattr(state, flag, value)
    # It looks at Celery's flags only, and a worker made here would change this whole process.
    assert object.__new__(Gate).closing is closing
    assert terminates() is (closing and flag == "should_terminate")


def test_a_message_that_a_child_has_in_part_is_written_whole_before_the_end(yard: Yard) -> None:
    # Given a child that does not read, and a message that is more than its pipe holds
    with yard.worker("prefork", 1, warm=True) as worker:
        yard.send("note", "first")
        yard.ran(1)
        # The child has said so, or its worker would take it for busy.
        yard.settled()
        (child,) = worker.children()
        child.suspend()
        result = yard.send("note", "x" * 300_000)
        worker.wait_for_log(result.id)
        # Who answers has turned its loop since, and has written what the pipe holds.
        yard.is_heard()
        # When the worker is told to stop
        assert worker.process is not None
        worker.process.send_signal(signal.SIGTERM)
        worker.wait_for_log("Warm shutdown")
        child.resume()
        assert worker.wait(60) == 0
    # Then it has run, and is over.
    assert len(yard.ran(2)[1]) == 300_000
    yard.settled()


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_what_runs_while_a_worker_stops_may_wait_on_a_connection_of_its_own(yard: Yard, pool: str) -> None:
    with yard.worker(pool, 1, warm=True) as worker:
        yard.send("listen", "a", 1.0)
        yard.ran(1, 30, "began")
        assert worker.process is not None
        worker.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "Warm shutdown" in worker.log, 30)
        yard.witness.release("a")
        worker.wait(30)
    (listened,) = yard.witness.told("listened")
    # Who asks others, and waits for what they answer, would take them for silent.
    assert float(listened) > 0.9
