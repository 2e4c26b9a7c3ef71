"""``celery dq workers``, ``partitions``, ``status`` and ``explain`` of a queue that workers share."""

from __future__ import annotations

import json
from typing import Any

from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_dq.allocation.assignment import RunningWorker, compute
from celery_dq.allocation.nodes import Registration
from celery_dq.cli import dq
from celery_dq.inspector.workers import WorkerSnapshot
from tests.allocation.shared_queue import QUEUE, SharedQueue, tenants


def output(shared_queue: SharedQueue, *words: str) -> str:
    context = CLIContext(app=shared_queue.app, no_color=True, workdir=None)
    result = CliRunner().invoke(dq, list(words), obj=context)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result.output


def test_the_commands_name_the_worker_of_each_partition(shared_queue: SharedQueue) -> None:
    app: Any = shared_queue.app
    assert output(shared_queue, "workers") == "No worker consumes a queue.\n"
    tenant = tenants(8)[5]
    shared_queue.send("note", 1, tenant=tenant)
    Registration(shared_queue.session, shared_queue.nodes, "w1@host").write(
        RunningWorker("w1@host", {QUEUE: 8}, draining=True)
    )
    assert app.dq.workers() == [WorkerSnapshot("w1@host", "draining", (), (QUEUE,))]
    assigned = compute([RunningWorker("w1@host", {QUEUE: 8}), RunningWorker("w2@host", {QUEUE: 8})])
    shared_queue.published.publish(assigned, assigned, token=1, since=1.0)
    Registration(shared_queue.session, shared_queue.nodes, "w3@host").write(
        RunningWorker("w3@host", {QUEUE: 8})
    )
    states = {each["name"]: each["state"] for each in json.loads(output(shared_queue, "workers", "--json"))}
    assert states == {"w1@host": "draining", "w2@host": "gone", "w3@host": "waits"}
    rows = json.loads(output(shared_queue, "partitions", QUEUE, "--json"))
    assert [row["worker"] for row in rows] == [assigned.servers[QUEUE, number] for number in range(8)]
    assert "worker" in output(shared_queue, "partitions").splitlines()[0]
    assert "w3@host  waits" in output(shared_queue, "status")
    whose = f"Worker {assigned.servers[QUEUE, 5]} serves {QUEUE}/5."
    assert output(shared_queue, "explain", "--tenant", tenant, "--queue", QUEUE).strip().endswith(whose)
    (message,) = app.dq.queues[QUEUE].peek()
    assert app.dq.explain(task_id=message.id).sentence.endswith(whose)
    app.conf.dq_allocation = False
    app.dq.context._options = None
    assert app.dq.workers() == []
