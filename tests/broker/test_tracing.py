"""The spans of ``dq_otel``, and that there are none without it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.brokers import BROKERS
from tests.workers import ROOT, WorkerProcess, environment

MODULE = "tests.broker.traced_shop"


@pytest.fixture
def conf(redis_server: RedisServer, redis_databases: Iterator[int]) -> dict[str, Any]:
    broker, spans = next(redis_databases), next(redis_databases)
    for each in (broker, spans):
        redis_server.flush(each)
    return {
        "broker_url": redis_server.url(broker, scheme="dq-redis"),
        "spans_url": redis_server.url(spans),
        "dq_otel": True,
        "dq_buffer_folder": "",
        "dq_dead_letter_failures": True,
        "dq_max_deliveries": 2,
        "dq_queues": {"shop": {"partitions": 2}},
        "task_ignore_result": True,
    }


def spans_of(client: Any) -> dict[str, list[Any]]:
    found = defaultdict(list)
    for each in map(json.loads, client.lrange("spans", 0, -1)):
        found[each["name"]].append(each)
    return found


def call_tasks(conf: dict[str, Any]) -> dict[str, str]:
    ran = subprocess.run(
        [sys.executable, "-m", MODULE],
        cwd=ROOT,
        env=environment(BROKERS["dq"], conf),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    traces: dict[str, str] = json.loads(ran.stdout)
    return traces


def test_a_trace_shows_hand_over_deliveries_and_dead_letters(conf: dict[str, Any]) -> None:
    client: Any = redis.Redis.from_url(conf["spans_url"])
    traces = call_tasks(conf)
    worker = WorkerProcess(MODULE, broker=BROKERS["dq"], conf=conf, concurrency=1)
    with worker:
        wait_until(lambda: len(spans_of(client)["dead_letter shop"]) == 2, 60)
        assert "No tracer provider" not in worker.log
    spans = spans_of(client)
    sent = spans["send shop"]
    linked = [link["context"]["trace_id"] for span in sent for link in span["links"]]
    assert sorted(linked) == sorted(traces.values())
    assert sum(span["attributes"]["messaging.batch.message_count"] for span in sent) == 3
    received = defaultdict(list)
    for span in spans["receive shop"]:
        received[span["context"]["trace_id"]].append(span["attributes"]["celery_dq.deliveries"])
    assert received == {traces["succeeds"]: [0], traces["fails"]: [0], traces["dies"]: [0, 1]}
    attributes = spans["receive shop"][0]["attributes"]
    assert attributes["messaging.operation.type"] == "receive"
    assert attributes["messaging.destination.partition.id"] in "01"
    dead = {span["context"]["trace_id"]: span["status"] for span in spans["dead_letter shop"]}
    assert dead == {
        traces["fails"]: {"status_code": "ERROR", "description": "failed: ValueError: broken"},
        traces["dies"]: {"status_code": "ERROR", "description": "max_deliveries"},
    }


def test_a_worker_without_a_tracer_provider_warns_once(conf: dict[str, Any]) -> None:
    call_tasks(conf)
    worker = WorkerProcess(
        MODULE, broker=BROKERS["dq"], conf={**conf, "traced_in_children": True}, concurrency=1
    )
    with worker:
        worker.wait_for_log("No tracer provider is set in the main process of worker w1@proof: its spans")
        worker.wait_for_log("was dead-lettered after 2 deliveries", 60)
        assert worker.log.count("No tracer provider") == 1


WITHOUT = """
import sys
sys.modules["opentelemetry"] = None
from celery import Celery
import celery_dq, celery_dq.tracing.worker_step
app = celery_dq.setup(Celery(broker="dq-redis://127.0.0.1:1"))
"""


@pytest.mark.parametrize("is_on", [False, True])
def test_without_the_library_only_the_setting_fails(is_on: bool) -> None:
    program = f"{WITHOUT}\napp.conf.dq_otel = {is_on}\napp.dq.make_sender(app)"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ("celery-dq[otel]" in ran.stderr) == is_on == bool(ran.returncode), ran.stderr
