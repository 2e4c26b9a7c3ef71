"""``celery dq alive`` and ``ready``: the file of a real worker, and the manifests of the guide."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from celery.bin.celery import celery as celery_command

from celery_dq.clock import ManualClock, SystemClock
from celery_dq.per_process import start_of
from celery_dq.probe import ProbeState, ask_probe, main
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.brokers import BROKERS
from tests.workers import WorkerProcess, make_app

MODULE = "tests.migration.worker_app"
MANIFESTS = Path(__file__).parents[2] / "example_project" / "kubernetes"


STATE = ProbeState("w1", os.getpid(), "consuming", 100.0, 99.0, 15.0, start_of(os.getpid()))


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def worker_on(url: str, file: Path, pool: str, broker: str = "dq") -> WorkerProcess:
    conf = {
        "broker_url": url,
        "ledger_url": url.removeprefix("dq-"),
        "dq_probe_file": str(file),
        "dq_lease": "1s",
    }
    return WorkerProcess(MODULE, broker=BROKERS[broker], conf=conf, pool=pool, preloaded=True)


def later(seconds: float) -> ManualClock:
    return ManualClock(monotonic=SystemClock().monotonic() + seconds)


@pytest.mark.logged_error("Cannot connect to")
def test_a_worker_through_an_outage_and_its_end(server: RedisServer, tmp_path: Path) -> None:
    file = tmp_path / "worker"
    assert "there is no file" in ask_probe("alive", file).reason
    with worker_on(server.url(scheme="dq-redis"), file, "prefork") as worker:
        wait_until(lambda: ask_probe("ready", file).ok, 30)
        assert not ask_probe("alive", file, clock=later(60)).ok
        assert main(["alive", str(file)]) == 0
        server.kill()
        wait_until(lambda: not ask_probe("ready", file).ok, 30)
        assert ask_probe("alive", file, clock=later(600)).ok
        server.start()
        wait_until(lambda: ask_probe("ready", file).ok, 30)
        worker.stop()
    assert not file.exists()


def test_a_solo_worker_in_a_task_reports_that_it_stops(redis_url: str, tmp_path: Path) -> None:
    file = tmp_path / "worker"
    url = redis_url.replace("redis", "dq-redis", 1)
    with redis.Redis.from_url(redis_url) as ledger, worker_on(url, file, "solo") as worker:
        wait_until(lambda: ask_probe("ready", file).ok, 30)
        app = make_app("moving", BROKERS["dq"], {"broker_url": url})
        app.send_task("wait")
        wait_until(lambda: ledger.exists("waits"), 30)
        worker.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
        wait_until(lambda: "stops after its running tasks" in ask_probe("ready", file).reason, 30)
        assert ask_probe("alive", file).ok
        ledger.rpush("go", 1)
        worker.wait()
        app.pool.force_close_all()  # type: ignore[attr-defined]
    assert not file.exists()


@pytest.mark.parametrize("name", ["w2@host", "w1@proof"])
def test_a_worker_leaves_the_file_of_another_one_and_warns(redis_url: str, tmp_path: Path, name: str) -> None:
    file = tmp_path / "worker"
    other = replace(STATE, worker=name, turned_at=SystemClock().monotonic())
    other.write(file)
    with worker_on(redis_url, file, "threads", "stock") as worker:
        worker.wait_for_log(f"and {name} (process {os.getpid()}) keep one dq_probe_file", 30)
        wait_until(lambda: json.loads(file.read_text())["phase"] == "consuming", 30)
        wait_until(lambda: ask_probe("ready", file).ok, 30)
        worker.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
        # The other one writes the file again, before this worker is gone.
        while worker.alive:
            other.write(file)
    assert ProbeState.read(file) == other


def test_a_pool_of_greenlets_keeps_the_file_too(redis_url: str, tmp_path: Path) -> None:
    file = tmp_path / "w1"
    url = redis_url.replace("redis", "dq-redis", 1)
    with worker_on(url, tmp_path / "%n", "gevent") as worker:
        wait_until(lambda: ask_probe("ready", file).ok, 30)
        first = json.loads(file.read_text())["turned_at"]
        wait_until(lambda: json.loads(file.read_text())["turned_at"] > first, 30)
        worker.process.send_signal(signal.SIGKILL)  # type: ignore[union-attr]
        worker.wait()
        assert "is gone" in ask_probe("alive", file).reason


def test_a_hanging_broker_is_not_ready(server: RedisServer, tmp_path: Path) -> None:
    file = tmp_path / "worker"
    with worker_on(server.url(scheme="dq-redis"), file, "threads"):
        wait_until(lambda: ask_probe("ready", file).ok, 30)
        server.pause()
        wait_until(lambda: not ask_probe("ready", file).ok, 30)
        assert ask_probe("alive", file).ok
        server.resume()
        wait_until(lambda: ask_probe("ready", file).ok, 30)


@pytest.mark.logged_error("cannot be written")
def test_a_file_that_cannot_be_written_ends_the_worker(redis_url: str) -> None:
    url = redis_url.replace("redis", "dq-redis", 1)
    worker = worker_on(url, Path("/nowhere/worker"), "threads").start()
    assert worker.wait() != 0
    assert "dq_probe_file = '/nowhere/worker' cannot be written" in worker.log
    worker.discard()


@pytest.mark.parametrize(
    ("now", "alive", "ready", "words"),
    [
        (101, True, True, "turned 1 s ago"),
        (131, False, False, "has not turned for 31 s (limit 30 s)"),
        (115, True, False, "has not answered worker w1 for 16 s"),
        (50, False, False, "has not turned for -50 s"),
    ],
)
def test_an_answer_by_the_clock(tmp_path: Path, now: float, alive: bool, ready: bool, words: str) -> None:
    file = tmp_path / "worker"
    STATE.write(file)
    clock = ManualClock(monotonic=now)
    assert ask_probe("alive", file, clock=clock).ok == alive
    answer = ask_probe("ready", file, clock=clock)
    assert (answer.ok, words in answer.reason) == (ready, True)


@pytest.mark.parametrize("phase", ["connecting", "consuming", "stopping"])
def test_the_file_of_a_process_that_had_the_same_pid(tmp_path: Path, phase: Any) -> None:
    file = tmp_path / "worker"
    clock = ManualClock(monotonic=100.0)
    before = replace(STATE, phase=phase)
    before.write(file)
    assert ask_probe("alive", file, clock=clock).ok
    # A container that is restarted in its pod has the file, and is process 1 again.
    replace(before, started=str(int(before.started) - 1)).write(file)
    answer = ask_probe("alive", file, clock=clock)
    assert (answer.ok, answer.reason) == (False, f"Worker w1 is gone: process {before.pid} is another one.")


@pytest.mark.parametrize("arguments", [[], ["dead", "x"], ["alive"], ["alive", "x", "soon"]])
def test_a_wrong_use_of_the_module(arguments: list[str]) -> None:
    assert main(arguments) == 2


def test_an_answer_names_a_worker_in_any_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, written = tmp_path / "worker", io.BytesIO()
    replace(STATE, worker="łódź", turned_at=SystemClock().monotonic()).write(file)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "latin-1", write_through=True))
    assert main(["alive", str(file)]) == 0
    assert r"Worker \u0142ód\u017a consumes" in written.getvalue().decode("latin-1")


def test_the_module_loads_no_library() -> None:
    program = "import sys, celery_dq.probe; print({'celery', 'kombu', 'redis', 'click'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("path", sorted(MANIFESTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_manifest_names_commands_that_exist(path: Path) -> None:
    manifest = yaml.safe_load(path.read_text())
    pod = manifest["spec"]["template"]["spec"]
    assert (
        manifest["spec"]["selector"]["matchLabels"].items()
        <= manifest["spec"]["template"]["metadata"]["labels"].items()
    )
    (container,) = pod["containers"]
    assert container["command"] == ["celery"]
    words = [word for word in container["args"][2:] if not str(word).startswith("-")]
    command: Any = celery_command
    for word in words[:2]:
        command = getattr(command, "commands", {}).get(word, command)
    assert command is not celery_command
    known = {name for each in command.params for name in [*each.opts, *each.secondary_opts]}
    given = {str(word).partition("=")[0] for word in container["args"][2:] if str(word).startswith("-")}
    assert given <= known
    environment = {each["name"]: each.get("value") for each in container["env"]}
    if "SOFT_SHUTDOWN" in environment:
        assert float(environment["SOFT_SHUTDOWN"]) < pod["terminationGracePeriodSeconds"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(name, {}).get("exec", {}).get("command")
        if probe:
            assert probe[:3] == ["python", "-m", "celery_dq.probe"]
            assert (probe[3] in ("alive", "ready"), probe[4]) == (True, environment["DQ_PROBE_FILE"])
