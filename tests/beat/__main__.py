"""Beats with random faults: ``python -m tests.beat --seconds 60 --seed 1``.

Several ``celery beat`` processes share a schedule of many entries. At random moments, a process is killed and
replaced, or stopped and continued later. At the end, the test checks that the broker has each tick once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer
from tests.beat.conftest import make_app, settings
from tests.workers import ROOT

SESSION_S = 1.2
EVERY_S = 0.25


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--beats", type=int, default=3)
    parser.add_argument("--entries", type=int, default=8)
    parser.add_argument("--zookeeper", action="store_true", help="it holds the election")
    return parser.parse_args()


class Beats:
    """The beat processes, and the faults that they suffer."""

    def __init__(self, conf: dict[str, Any], folder: Path, count: int) -> None:
        self._conf = conf
        self._folder = folder
        self._log = (folder / "beats.log").open("ab")
        self.alive = [self._start() for _ in range(count)]
        self.stopped: dict[int, float] = {}
        self.kills = self.stops = 0

    def _start(self) -> subprocess.Popen[bytes]:
        described = json.dumps({"conf": self._conf, "fault": "", "flag": "", "sleepy": False})
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.beat.program", "beat", "-S"),
                *("celery_dq.beat:ElectedScheduler", "-l", "INFO", "--pidfile", ""),
            ],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "DQ_BEAT": described},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def kill(self, number: int) -> None:
        self.kills += 1
        self.stopped.pop(number, None)
        self.alive[number].kill()
        self.alive[number].wait()
        self.alive[number] = self._start()

    def stop(self, number: int, seconds: float) -> None:
        if number not in self.stopped:
            self.stops += 1
            self.alive[number].send_signal(signal.SIGSTOP)
            self.stopped[number] = time.monotonic() + seconds

    def let_go(self, every: bool = False) -> None:
        for number, until in list(self.stopped.items()):
            if every or time.monotonic() > until:
                self.alive[number].send_signal(signal.SIGCONT)
                del self.stopped[number]

    def check(self) -> None:
        for beat in self.alive:
            if beat.poll() is not None:
                raise SystemExit(f"a beat ended with {beat.returncode}: {self._folder}/beats.log")

    def close(self) -> None:
        self.let_go(every=True)
        for beat in self.alive:
            beat.terminate()
        for beat in self.alive:
            beat.wait(20)
        self._log.close()


def main() -> int:
    chosen = arguments()
    chance = random.Random(chosen.seed)
    folder = Path(tempfile.mkdtemp(prefix="beats-"))
    with ExitStack() as stack:
        url = stack.enter_context(RedisServer()).url(1)
        more: dict[str, Any] = {}
        if chosen.zookeeper:
            server = stack.enter_context(ZooKeeperServer(tick_ms=200))
            more["dq_election"] = f"zookeeper://{server.hosts}/beats"
        schedule = {
            f"entry-{number}": {"task": "tick", "schedule": EVERY_S, "options": {"queue": f"q{number}"}}
            for number in range(chosen.entries)
        }
        conf = settings(url, dq_election_session=SESSION_S, beat_schedule=schedule, **more)
        app = make_app(conf)

        def sent() -> list[list[str]]:
            # One call returns at most 1000 messages, which is enough for any but a very long run.
            return [
                [message.id for message in app.dq.queues[f"q{number}"].peek(limit=1000)]
                for number in range(chosen.entries)
            ]

        beats = Beats(conf, folder, chosen.beats)
        stack.callback(beats.close)
        wait_until(lambda: all(sent()), 60)
        until = time.monotonic() + chosen.seconds
        while time.monotonic() < until:
            victim = chance.randrange(chosen.beats)
            if chance.random() < 0.4:
                beats.kill(victim)
            else:
                beats.stop(victim, chance.uniform(0.1, 3 * SESSION_S))
            time.sleep(chance.uniform(0, 2 * SESSION_S))  # duration of the fault
            beats.let_go()
            beats.check()
        beats.let_go(every=True)
        before = [len(ids) for ids in sent()]
        wait_until(lambda: all(len(ids) > was for ids, was in zip(sent(), before, strict=True)), 60)
        queues = sent()
        leaders = (folder / "beats.log").read_text(errors="replace").count(" leads, token")
    ids = [each for queue in queues for each in queue]
    twice = [each for each in ids if "~" in each] + sorted({each for each in ids if ids.count(each) > 1})
    faults = f"{beats.kills} kills, {beats.stops} stops"
    print(f"{len(ids)} ticks, {leaders} leaders, {faults}: {len(twice)} sent twice")
    return int(bool(twice))


if __name__ == "__main__":
    sys.exit(main())
