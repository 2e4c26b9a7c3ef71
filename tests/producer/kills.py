"""Producers that are killed repeatedly, with one shared folder, while the broker has faults too.

``python -m tests.producer.kills --kills 1000 --processes 4 --seed 7``

A producer calls tasks at its pace, and records each id in its own ledger *after* the call has returned. At a
random time it gets SIGKILL. Meanwhile the broker is paused (SIGSTOP), loses its connections, is killed and
restarted (with its data on disk), or restarts several times in quick succession. At the end a last process
adopts the remaining messages, and the content of the broker is compared with the ledgers:

* lost: recorded, but not in the broker;
* duplicated: in the broker more than once (then with the suffix ``~1``);
* out of order: in the broker before an earlier call of the same producer.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery import Celery

import celery_dq
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.producer.conftest import Stored

QUEUE = "push"


def make_app(url: str, folder: Path, **conf: Any) -> Any:
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(
        dq_buffer=True,
        dq_buffer_folder=str(folder),
        dq_buffer_linger="1ms",
        dq_buffer_batch_size=50,
        task_routes={"job": QUEUE},
        broker_transport_options={"socket_timeout": 1.0, "socket_connect_timeout": 1.0},
        **conf,
    )
    celery_dq.setup(app)

    def job(number: int) -> None: ...

    app.task(name="job", shared=False)(job)
    return app


def produce(url: str, folder: Path, name: str, pace: float) -> None:
    job = make_app(url, folder).tasks["job"]
    ledger = os.open(folder.parent / f"{name}.ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    number = 0
    while True:
        number += 1
        task_id = f"{name}-{number:06d}"
        job.apply_async((number,), task_id=task_id)
        os.write(ledger, f"{task_id}\n".encode())
        if pace:
            time.sleep(pace)  # of the load


@dataclass
class Verdict:
    kills: int = 0
    accepted: int = 0
    stored: int = 0
    unnoted: int = 0
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    disordered: list[str] = field(default_factory=list)
    left_folders: int = 0
    quarantined: int = 0
    troubles: dict[str, int] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        return not (self.lost or self.duplicated or self.disordered or self.left_folders)

    def __str__(self) -> str:
        return (
            f"{self.kills} kills, {self.accepted} accepted, {self.stored} in the broker "
            f"({self.unnoted} of them of calls that had not returned): lost {len(self.lost)}, duplicated "
            f"{len(self.duplicated)}, out of order {len(self.disordered)}; folders left {self.left_folders}, "
            f"quarantined {self.quarantined}; troubles of the broker {self.troubles}"
        )


def judge(verdict: Verdict, base: Path, ids: list[str]) -> Verdict:
    """Compare the broker's content, in its order, with the ledgers."""
    accepted = [
        line for path in base.glob("*.ledger") for line in path.read_text().splitlines() if len(line) > 7
    ]
    seen = set(ids)
    verdict.accepted, verdict.stored = len(accepted), len(ids)
    verdict.lost = [each for each in accepted if each not in seen]
    verdict.duplicated = [each for each in ids if "~" in each]
    verdict.unnoted = len(seen - set(accepted)) - len(verdict.duplicated)
    last: dict[str, int] = {}
    for each in ids:
        name, _, number = each.partition("~")[0].rpartition("-")
        if int(number) <= last.get(name, 0):
            verdict.disordered.append(each)
        last[name] = max(last.get(name, 0), int(number))
    return verdict


class Run:
    """One run: producers as forks of this process, a broker, and its faults."""

    def __init__(self, server: RedisServer, base: Path, seed: int, processes: int) -> None:
        self.server = server
        self.url = server.url(scheme="dq-redis")
        self.folder = base / "spill"
        self.base = base
        self.chance = random.Random(seed)
        self.processes = processes
        self.verdict = Verdict()
        #: Time of the kill by pid. It is decided after the first call of the process.
        self._alive: dict[int, float] = {}
        self._new: dict[int, Path] = {}
        self._born = 0
        self._trouble_until = 0.0
        self._end_trouble: Any = None

    def run(self, kills: int, seconds: float) -> Verdict:
        deadline = time.monotonic() + seconds
        try:
            while self.verdict.kills < kills and time.monotonic() < deadline:
                while len(self._alive) < self.processes:
                    self._spawn()
                self._kill_whose_time_has_come()
                self._trouble()
                time.sleep(0.002)  # the pace of the faults
        finally:
            for pid in list(self._alive):
                self._kill(pid)
            if self._end_trouble is not None:
                self._end_trouble()
        return self._settle()

    def _spawn(self) -> None:
        self._born += 1
        name, pace = f"p{self._born:05d}", self.chance.choice((0.0, 0.001, 0.003))
        pid = os.fork()
        if pid == 0:
            try:
                # The child must repeat neither the random state nor the buffered output of the parent.
                produce(self.url, self.folder, name, pace)
            except BaseException as error:
                print(f"producer {name} failed: {error!r}", file=sys.stderr, flush=True)
            finally:
                os._exit(1)
        early = self.chance.random() < 0.1
        self._alive[pid] = time.monotonic() + (self.chance.uniform(0.0, 0.5) if early else 10.0)
        if not early:
            self._new[pid] = self.base / f"{name}.ledger"

    def _kill_whose_time_has_come(self) -> None:
        now = time.monotonic()
        for pid, ledger in list(self._new.items()):
            if ledger.exists() and ledger.stat().st_size:
                self._alive[pid] = now + self.chance.uniform(0.0, 0.3)
                del self._new[pid]
        for pid, due in list(self._alive.items()):
            if now >= due:
                self._kill(pid)
                self.verdict.kills += 1

    def _kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        del self._alive[pid]
        self._new.pop(pid, None)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise AssertionError("a producer ended by itself")

    def _trouble(self) -> None:
        now = time.monotonic()
        if now < self._trouble_until:
            return
        if self._end_trouble is not None:
            self._end_trouble()
            self._end_trouble = None
            self._trouble_until = now + self.chance.uniform(0.1, 0.5)
            return
        kind = self.chance.choice(("stopped", "cut off", "cut off", "killed", "flapping"))
        self.verdict.troubles[kind] = self.verdict.troubles.get(kind, 0) + 1
        if kind == "stopped":
            self.server.pause()
            self._end_trouble = self.server.resume
        elif kind in ("killed", "flapping"):
            for _ in range(3 if kind == "flapping" else 0):
                self.server.kill()
                self.server.start()
            self.server.kill()
            self._end_trouble = self.server.start
        else:
            self.server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes", timeout_s=30.0)
            self._trouble_until = now + self.chance.uniform(0.01, 0.1)
            return
        self._trouble_until = now + self.chance.uniform(0.05, 0.6)

    def _settle(self) -> Verdict:
        app = make_app(self.url, self.folder)
        try:
            app.dq.buffer.replay()
            # Folders are searched every few seconds, and messages of a folder are counted when it is read.
            wait_until(
                lambda: not self._left(app) and len(app.dq.buffer) == 0,
                60,
                what=lambda: f"the spill log to be replayed: {app.dq.buffer.inspect()}",
                interval_s=0.05,
            )
            snapshot = app.dq.buffer.inspect()
            self.verdict.quarantined = len(snapshot.quarantined)
            self.verdict.left_folders = self._left(app)
            stored = Stored(self.url)
            ids = stored.ids(QUEUE)
            stored.client.close()
            return judge(self.verdict, self.base, ids)
        finally:
            app.dq.buffer.close(1)
            app.close()

    @staticmethod
    def _left(app: Any) -> int:
        """Return the number of folders of dead producers."""
        owners = app.dq.buffer.inspect().owners
        return len([each for each in owners if not each.startswith(f"{os.getpid()}.")])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=600, help="end earlier than that")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    with RedisServer(appendonly=True) as server, tempfile.TemporaryDirectory() as base:
        run = Run(server, Path(base), options.seed, options.processes)
        verdict = run.run(options.kills, options.seconds)
    print(f"seed {options.seed}: {verdict}")
    for what in ("lost", "duplicated", "disordered"):
        if getattr(verdict, what):
            print(what, getattr(verdict, what)[:20])
    return 0 if verdict.clean else 1


if __name__ == "__main__":
    sys.exit(main())
