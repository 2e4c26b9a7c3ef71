"""Real ``celery beat`` processes, and workers with a beat, that die or stop at the moment of a tick.

``python -m tests.beat`` runs a longer version.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from celery_dq.beat.scheduler import leadership
from celery_dq.keys import PartitionKeys
from celery_dq.leadership.redis_election import RedisElection
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer
from tests.beat.conftest import once, ticks
from tests.log_watch import WATCH
from tests.preloaded import ROOT, PythonFork

Start = Callable[..., PythonFork]
BEAT = ["beat", "-S", "tests.beat.program:FaultyScheduler", "-l", "INFO", "--pidfile", ""]


@pytest.fixture
def start(conf: dict[str, Any], tmp_path: Path) -> Iterator[Start]:
    """Start the program of this folder with Celery's arguments; its output goes to ``<number>.log``."""
    started: list[PythonFork] = []

    def start_one(*arguments: str, fault: str = "", sleepy: bool = False, **more: Any) -> PythonFork:
        flag = str(tmp_path / "happened")
        described = {"conf": {**conf, **more}, "fault": fault, "flag": flag, "sleepy": sleepy}
        path = tmp_path / f"{len(started)}.log"
        WATCH.watch(path)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "DQ_BEAT": json.dumps(described)}
        words = ["-m", "tests.beat.program", *(arguments or BEAT)]
        started.append(PythonFork(words, environment, path, folder=tmp_path))
        return started[-1]

    yield start_one
    for process in started:
        family = []
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
        for child in family:
            child.kill()
        process.wait(30)


def stopped(process: PythonFork) -> bool:
    return bool(psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)


def tokens(folder: Path) -> list[int]:
    """Return the tokens of all leaders, in the order of the log files."""
    logs = sorted(folder.glob("*.log"))
    return [int(each) for log in logs for each in re.findall(r"Beat \S+ leads, token (\d+)", log.read_text())]


def election_by(kind: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    if kind == "redis":
        return {}
    server: ZooKeeperServer = request.getfixturevalue("zookeeper")
    return {"dq_election": f"zookeeper://{server.hosts}/t-{uuid.uuid4().hex[:8]}"}


@pytest.mark.parametrize(
    ("fault", "election"),
    [
        ("kill after", "redis"),
        ("stop before", "zookeeper"),
    ],
)
def test_one_that_dies_or_stops_at_the_moment_of_a_tick(
    fault: str, election: str, app: Any, start: Start, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # A killed or stopped leader is replaced when its session expires.
    conf = {**election_by(election, request), "dq_election_session": 2}
    beats = [start(fault=fault, **conf) for _ in range(2)]
    happened = tmp_path / "happened"
    wait_until(happened.exists, 60)
    before = len(ticks(app))
    wait_until(lambda: len(ticks(app)) >= before + 2, 60)
    for beat in beats:
        if beat.poll() is None and stopped(beat):
            # Another beat leads by now, and has sent the tick that this one was about to send.
            beat.send_signal(signal.SIGCONT)
    after = len(ticks(app))
    wait_until(lambda: len(ticks(app)) >= after + 2, 60)
    assert once(app)
    assert len(tokens(tmp_path)) >= 2
    assert len(set(tokens(tmp_path))) == len(tokens(tmp_path))
    assert sum(beat.poll() is None for beat in beats) == (1 if fault.startswith("kill") else 2)


def test_a_worker_with_a_beat_hands_over_when_it_stops(app: Any, start: Start, tmp_path: Path) -> None:
    session_s = 60
    worker = ("worker", "-B", "--scheduler", "celery_dq.beat:ElectedScheduler", "-Q", "none")
    alone = ("-l", "INFO", "-c", "1", "--without-mingle", "--without-gossip", "--without-heartbeat")
    workers = [
        start(*worker, *alone, "-n", f"w{number}@proof", dq_election_session=session_s, sleepy=True)
        for number in (1, 2)
    ]
    wait_until(lambda: len(ticks(app)) >= 2, 60)
    # Both workers are in their loops, where only the signal ends the wait.
    wait_until(lambda: len(app.control.ping(timeout=2.0, limit=2)) == 2, 60)
    old = leading_pid(app)
    leader = next(each for each in workers if old in descendants(each))
    began = time.monotonic()
    leader.terminate()
    wait_until(lambda: leading_pid(app) not in (0, old), 60)
    assert time.monotonic() - began < session_s * 0.6
    before = len(ticks(app))
    wait_until(lambda: len(ticks(app)) >= before + 2, 60)
    assert leader.wait(60) == 0
    assert once(app)


def leading_pid(app: Any) -> int:
    """Return the process id of the leading beat; 0 if there is none."""
    with closing(redis.Redis.from_url(app.conf.broker_url.removeprefix("dq-"))) as client:
        leader = RedisElection(client, PartitionKeys("online", leadership("beating")), "observer").leader()
        return int(leader.who.split(":")[-2]) if leader is not None else 0


def descendants(process: PythonFork) -> list[int]:
    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
