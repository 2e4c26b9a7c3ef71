"""Processes that serve metrics: ``celery dq exporter``, and workers with ``dq_metrics_port``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery import Celery

import celery_dq
from celery_dq.metrics.table import METRICS
from celery_dq.testing.processes import free_port
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.broker.worker_app import WorkerApp
from tests.dq_command import run_dq
from tests.metrics.conftest import scrape

ROOT = Path(__file__).parents[2]


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def exporter(broker_url: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "celery", "-b", broker_url, "dq", "exporter", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_the_exporter_serves_until_it_is_stopped(
    exporter: subprocess.Popen[str], how: signal.Signals
) -> None:
    assert exporter.stdout is not None
    words = exporter.stdout.readline().split()
    assert words[:3] == ["Serving", "metrics", "on"]
    assert scrape(words[-1])("celery_dq_up") == 1
    exporter.send_signal(how)
    out, err = exporter.communicate(timeout=20)
    assert (exporter.returncode, out, err) == (0, "Stopped.\n", "")


def run(*words: str, **conf: Any) -> tuple[int, str]:
    with Celery("shop", broker="dq-redis://127.0.0.1:1/0", set_as_current=False) as app:
        app.conf.update(conf)
        celery_dq.setup(app)
        result = run_dq(app, "exporter", *words, status=None)
        return result.exit_code, result.output


def test_the_exporter_names_a_port_that_is_taken() -> None:
    with taken_port() as port:
        status, text = run("--port", str(port))
    assert status == 1
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use): give another --port" in text


def test_the_exporter_names_a_host_that_cannot_be_one() -> None:
    status, text = run("--host", "0.0.0..0")
    assert status == 1
    assert "cannot listen on 0.0.0..0:9540 ('0.0.0..0' cannot be the name of a host): give another" in text


def test_the_exporter_names_a_wrong_setting() -> None:
    status, text = run("--port", "0", dq_metrics_tenants=201)
    assert status == 1
    assert "dq_metrics_tenants = 201 is too large: give 200 or less" in text


@pytest.mark.parametrize(
    ("option", "name"), [("--print-alerts", "alerts.yml"), ("--print-dashboard", "dashboard.json")]
)
def test_the_exporter_prints_its_files(option: str, name: str) -> None:
    assert run(option) == (0, (files("celery_dq.metrics") / "files" / name).read_text())


@pytest.fixture
def worker_app(redis_server: RedisServer) -> Iterator[WorkerApp]:
    for db in (1, 2, 3):
        redis_server.flush(db)
    worker_app = WorkerApp(redis_server, dq_metrics_port=free_port(), dq_metrics_timeout=60)
    yield worker_app
    worker_app.close()


def listens(process: psutil.Process, port: int) -> bool:
    return any(each.laddr.port == port for each in process.net_connections() if each.status == "LISTEN")


def test_a_worker_serves_metrics_and_its_children_do_not_keep_the_port(worker_app: WorkerApp) -> None:
    port = worker_app.conf["dq_metrics_port"]
    with worker_app.worker("prefork", 1, warm=True) as worker:
        metrics = scrape(f"http://127.0.0.1:{port}/metrics")
        assert metrics("celery_dq_queue_consumers", queue=worker_app.queue) == 1
        assert listens(psutil.Process(worker.pid), port)
        # This child is forked after the worker has begun to listen.
        (first,) = worker.children()
        first.kill()
        wait_until(lambda: [each.pid for each in worker.children()] not in ([], [first.pid]))
        wait_until(lambda: not any(listens(each, port) for each in worker.children()))
        # During a warm shutdown the metrics are served until the last task has ended.
        worker_app.send("hold", "last")
        worker_app.witness.wait("began")
        os.kill(worker.pid, signal.SIGTERM)
        worker.wait_for_log("Warm shutdown")
        for _ in range(20):
            assert scrape(f"http://127.0.0.1:{port}/metrics")("celery_dq_up") == 1
        worker_app.witness.release("last")
        worker_app.witness.wait("ended")
    assert worker.returncode == 0


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_a_worker_serves_its_slots_and_the_times_of_its_claims(worker_app: WorkerApp, pool: str) -> None:
    url = f"http://127.0.0.1:{worker_app.conf['dq_metrics_port']}/metrics"
    queue = worker_app.queue
    with worker_app.worker(pool, 3):
        worker_app.send("note", 1)
        worker_app.ran(1)
        metrics = scrape(url)
        served = {name for name, _ in metrics.samples}
        for metric in METRICS:
            if metric.subject == "worker":
                assert served & {metric.name, f"{metric.name}_bucket"}
        assert metrics.of("celery_dq_queue_slots") == {(queue,): 3}
        counted = metrics("celery_dq_claim_duration_seconds_count", queue=queue)
        assert counted >= 1
        assert metrics("celery_dq_claim_duration_seconds_bucket", queue=queue, le="+Inf") == counted
        assert 0 < metrics("celery_dq_claim_duration_seconds_sum", queue=queue) < 60 * counted
        worker_app.app.control.cancel_consumer(queue)
        wait_until(lambda: scrape(url).of("celery_dq_queue_slots") == {})


def test_a_task_that_blocks_the_loop_of_gevent_does_not_block_the_metrics(worker_app: WorkerApp) -> None:
    with worker_app.worker("gevent", 1):
        worker_app.send("spin", 60)
        worker_app.ran(1, subject="began")
        metrics = scrape(f"http://127.0.0.1:{worker_app.conf['dq_metrics_port']}/metrics")
        assert metrics("celery_dq_queue_messages", queue=worker_app.queue, state="held") == 1
        assert worker_app.witness.reports("ended") == []


def test_a_worker_whose_port_is_taken_goes_on_without_metrics(worker_app: WorkerApp) -> None:
    with taken_port() as port:
        worker_app.conf["dq_metrics_port"] = port
        with worker_app.worker("solo") as worker:
            assert f"serves no metrics: it cannot listen on 127.0.0.1:{port}" in worker.log
            worker_app.send("note", 1)
            worker_app.ran(1)
