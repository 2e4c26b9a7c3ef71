"""Prefork pools whose connection is lost while they run tasks, or before they receive any."""

from __future__ import annotations

import pytest

from celery_dq.testing.waiting import wait_until
from tests.broker.proxy import Proxy
from tests.broker.worker_app import OpenApp, WorkerApp

DEADLINE_S = 30.0


def test_a_full_pool_is_full_after_a_lost_connection(
    worker_app: WorkerApp, proxy: Proxy, open_app: OpenApp
) -> None:
    far = open_app(port=proxy.port, task_default_queue=worker_app.queue)
    with far.worker("prefork", 2) as full:
        for key in "ab":
            worker_app.send("hold", key)
        worker_app.ran(2, DEADLINE_S, subject="began")
        proxy.cut_all()
        full.wait_for_log("Connected to", DEADLINE_S, occurrences=2)
        with worker_app.worker("threads", 1):
            for n in range(4):
                worker_app.send("note", n)
            assert sorted(worker_app.ran(4, DEADLINE_S)) == [*"0123"]
            # The notes did not wait for the tasks that still run.
            assert worker_app.witness.reports("ended") == []
        for key in "ab":
            worker_app.witness.release(key)
        worker_app.ran(2, DEADLINE_S, subject="ended")


def test_a_connection_that_is_lost_before_the_loop_turns_ends_no_worker(worker_app: WorkerApp) -> None:
    worker_app.conf["stumbles"] = True
    with worker_app.worker("prefork", 1) as worker:
        worker_app.send("note", "up again")
        assert worker_app.ran(1, DEADLINE_S) == ["up again"]
        assert "stumbled" in worker.log


def test_a_queue_added_after_a_child_was_replaced_costs_no_connection(worker_app: WorkerApp) -> None:
    worker_app.conf["broker_transport_options"] = {"socket_timeout": 2.0}
    arguments = ("--without-mingle", "--without-gossip", "--without-heartbeat", "--max-tasks-per-child=1")
    with worker_app.worker("prefork", 1, arguments=arguments) as worker:
        children = worker.children()
        worker_app.send("note", "first")
        worker_app.ran(1, DEADLINE_S)
        wait_until(lambda: worker.children() and not set(worker.children()) & set(children))
        # The second child has inherited the connections that the worker closes now.
        added = f"{worker_app.queue}-added"
        assert worker_app.app.control.add_consumer(added, reply=True, timeout=DEADLINE_S, limit=1)
        worker_app.wait_responsive()
        worker_app.send("note", added, queue=added)
        assert worker_app.ran(2, DEADLINE_S)[-1] == added
        assert "connection to broker lost" not in worker.log.lower()


def test_queues_added_after_each_kind_of_new_child_cost_no_connection(worker_app: WorkerApp) -> None:
    """A hard time limit, a crash and ``pool_grow`` fork a child that inherits the worker's connections."""
    worker_app.conf["broker_transport_options"] = {"socket_timeout": 2.0}
    control = worker_app.app.control
    with worker_app.worker("prefork", 1) as worker:
        worker_app.wait_responsive()
        for number, reason in enumerate(("limit", "crash", "pool_grow"), 1):
            children = set(worker.children())
            if reason == "limit":
                worker_app.send("hold", "limited", time_limit=1)
            elif reason == "crash":
                for child in children:
                    child.kill()
            else:
                assert control.pool_grow(1, reply=True, timeout=DEADLINE_S, limit=1)
            wait_until(lambda: set(worker.children()) - children, DEADLINE_S, what=reason)  # noqa: B023
            added = f"{worker_app.queue}-{reason}"
            assert control.add_consumer(added, reply=True, timeout=DEADLINE_S, limit=1)
            worker_app.wait_responsive()
            worker_app.send("note", reason, queue=added)
            assert worker_app.ran(number, DEADLINE_S)[-1] == reason
        assert "connection to broker lost" not in worker.log.lower()


def test_a_task_that_no_child_had_at_a_lost_connection_has_survived_no_crash(
    worker_app: WorkerApp, proxy: Proxy, open_app: OpenApp
) -> None:
    conf = {"dq_max_deliveries": 1, "holds_children": True, "worker_proc_alive_timeout": 60}
    far = open_app(port=proxy.port, task_default_queue=worker_app.queue, **conf)
    worker_app.witness.release("child")
    with far.worker("prefork", 1, arguments=("--max-tasks-per-child=1",)) as worker:
        worker_app.send("note", "first")
        worker_app.ran(2, DEADLINE_S, subject="child")  # the second child takes no task yet
        second = worker_app.send("note", "second").id
        inspect = worker_app.app.control.inspect([worker.name], timeout=10.0)
        wait_until(lambda: (inspect.query_task(second) or {}).get(worker.name), DEADLINE_S)
        proxy.cut_all()
        worker.wait_for_log("Connected to", DEADLINE_S, occurrences=2)
        worker_app.witness.release("child", 9)
        assert worker_app.ran(2, DEADLINE_S) == ["first", "second"]
        assert not worker_app.dead()


def test_a_task_that_celery_cancels_at_a_lost_connection_has_survived_no_crash(
    worker_app: WorkerApp, proxy: Proxy, open_app: OpenApp
) -> None:
    conf = {"dq_max_deliveries": 1, "dq_dead_letter_failures": True}
    cancels = {"worker_cancel_long_running_tasks_on_connection_loss": True}
    far = open_app(port=proxy.port, task_default_queue=worker_app.queue, **conf, **cancels)
    with far.worker("prefork", 1):
        result = worker_app.send("hold_late", "a")
        worker_app.ran(1, DEADLINE_S, subject="began")
        proxy.cut_all()
        worker_app.ran(2, DEADLINE_S, subject="began")
        worker_app.witness.release("a")
        assert result.get(timeout=DEADLINE_S) == "a"
        assert not worker_app.dead()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_message_that_is_rejected_after_a_lost_connection_becomes_a_dead_letter(
    worker_app: WorkerApp, proxy: Proxy, open_app: OpenApp, pool: str
) -> None:
    conf = {"dq_dead_letter_failures": True}
    far = open_app(port=proxy.port, task_default_queue=worker_app.queue, **conf)
    with far.worker(pool, 1) as worker:
        worker_app.send("hold_then_reject", "a")
        worker_app.ran(1, DEADLINE_S, subject="began")
        proxy.cut_all()
        worker.wait_for_log("Connected to", DEADLINE_S, occurrences=2)
        worker_app.witness.release("a")
        worker_app.settled()
        assert [b"rejected" in info for info in worker_app.dead().values()] == [True]


def test_a_crash_after_a_lost_connection_counts(
    worker_app: WorkerApp, proxy: Proxy, open_app: OpenApp
) -> None:
    far = open_app(port=proxy.port, task_default_queue=worker_app.queue, dq_max_deliveries=1)
    with far.worker("prefork", 1) as worker:
        worker_app.send("hold_late", "a")
        worker_app.ran(1, DEADLINE_S, subject="began")
        proxy.cut_all()
        worker.wait_for_log("Connected to", DEADLINE_S, occurrences=2)
        for child in worker.children():
            child.kill()
        reports = worker_app.witness.reports
        wait_until(lambda: worker_app.dead() or len(reports("began")) > 1, DEADLINE_S, what="its end")
        assert (len(worker_app.dead()), reports("began")) == (1, ["a"])
