"""A migration under load: both kinds of workers consume, both kinds of producers publish.

``python -m tests.migration.under_load --messages 100000`` prints the figures; ``--back`` migrates from the
tenant broker to kombu's Redis transport. Runs of the command are killed.
Each task adds one to its number in a ledger that neither broker knows. The exit status is 1 if a message was
lost or ran twice.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import redis
from celery import Celery

from celery_dq.app.api.migration import MigrationOptions
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.brokers import BROKERS
from tests.migration.worker_app import NAME, add_work
from tests.workers import ROOT, WorkerProcess, environment, make_app

MODULE = "tests.migration.worker_app"


@dataclass
class Figures:
    """The outcome.

    Attributes:
        published: Messages, of which so many to each broker.
        migrated: Messages that the runs of the command have reported; a killed run reports none.
        kills: Runs of the command that were killed.
        seconds: From the start of the first run to the end of the last one.
        lost: Messages that never ran.
        doubled: Messages that ran more than once.
    """

    published: int = 0
    to_stock: int = 0
    to_tenants: int = 0
    migrated: int = 0
    kills: int = 0
    seconds: float = 0.0
    lost: int = 0
    doubled: int = 0


class Move:
    """Two brokers, two workers, a ledger.

    Args:
        messages: Their number.
        kills: Number of runs that are killed.
        seed: The seed of the times after which runs are killed.
        back: Whether the migration leads from the tenant broker to the stock one.
    """

    def __init__(self, messages: int, kills: int, seed: int, *, back: bool = False) -> None:
        self.messages = messages
        self.kills = kills
        self.back = back
        #: The names of the source and of the target.
        self.names = ("dq", "stock") if back else ("stock", "dq")
        self.random = random.Random(seed)
        self.figures = Figures()
        self._stack = ExitStack()
        self._numbers = iter(range(messages))
        self._numbering = threading.Lock()

    def __enter__(self) -> Move:
        old = self._stack.enter_context(RedisServer())
        new = self._stack.enter_context(RedisServer())
        ledger_url = new.url(5)
        self.ledger = redis.Redis.from_url(ledger_url)
        self.stock = redis.Redis.from_url(old.url(0))
        self.confs = {
            "stock": {"broker_url": old.url(0), "ledger_url": ledger_url},
            "dq": {"broker_url": new.url(0, scheme="dq-redis"), "ledger_url": ledger_url},
        }
        self.apps = {name: self._app(name) for name in self.confs}
        self.workers = {name: self._worker(name) for name in self.confs}
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()

    def _app(self, name: str) -> Celery:
        app = self._stack.enter_context(add_work(make_app(NAME, BROKERS[name], self.confs[name])))
        self._stack.callback(lambda: app.pool.force_close_all())  # type: ignore[attr-defined]
        return app

    def _worker(self, name: str) -> WorkerProcess:
        return WorkerProcess(
            MODULE,
            broker=BROKERS[name],
            conf={**self.confs[name], "worker_prefetch_multiplier": 4},
            name=name,
            loglevel="WARNING",
            arguments=("--without-mingle", "--without-gossip"),
            preloaded=True,
        )

    def publish(self, name: str, count: int) -> None:
        """Publish so many messages; every fiftieth is due in a few seconds."""
        work: Any = self.apps[name].tasks["work"]
        for _ in range(count):
            with self._numbering:
                number = next(self._numbers)
            options = {"countdown": 2} if number % 50 == 0 else {}
            work.apply_async((number, f"t{number % 7}"), **options)

    def migrate(self) -> bool:
        """Migrate; return whether nothing is left."""
        app: Any = self.apps["dq"]
        with app.dq.migration(*self._urls(), options=MigrationOptions(priorities="same")) as migration:
            migration.survey(read=False)
            report = migration.run()
        self.figures.migrated += report.migrated
        return bool(report.is_complete)

    def _urls(self) -> list[str]:
        return [self.confs[name]["broker_url"] for name in self.names]

    def kill_a_migration(self, after_s: float) -> None:
        """Run the command, and kill it after some seconds."""
        dq = (sys.executable, "-m", "celery", "-A", MODULE, "dq")
        command = [*dq, "migrate", "--yes", "--priorities", "same", *self._urls()]
        run = subprocess.Popen(
            command, cwd=ROOT, env=environment(BROKERS["dq"], self.confs["dq"]), stdout=subprocess.DEVNULL
        )
        try:
            run.wait(after_s)
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()
            self.figures.kills += 1

    def run(self) -> Figures:
        """Fill the source, start both workers, migrate, and compare with the ledger."""
        backlog = self.messages * 6 // 10
        self.publish(self.names[0], backlog)
        with self.workers["stock"], self.workers["dq"]:
            self._under_load(self.messages - backlog)
            wait_until(lambda: self.ledger.hlen("runs") >= self.messages or self._is_idle(), 600)
        runs = {int(number): int(count) for number, count in self.ledger.hgetall("runs").items()}
        figures = self.figures
        figures.published = self.messages
        figures.lost = self.messages - len(runs)
        figures.doubled = Counter(count > 1 for count in runs.values())[True]
        return figures

    def _under_load(self, rest: int) -> None:
        to_source = self.messages - rest // 2
        self.figures.to_stock = rest // 2 if self.back else to_source
        self.figures.to_tenants = self.messages - self.figures.to_stock
        producers = [
            threading.Thread(target=self.publish, args=(self.names[0], rest - rest // 2)),
            threading.Thread(target=self.publish, args=(self.names[1], rest // 2)),
        ]
        for producer in producers:
            producer.start()
        began = time.monotonic()
        for _ in range(self.kills):
            self.kill_a_migration(self.random.uniform(1.0, 2.5))
        self.migrate()
        for producer in producers:
            producer.join()
        # No producer publishes to the source now; its worker returns what it holds.
        self.migrate()
        self.workers[self.names[0]].stop()
        assert self.migrate(), "something stays on the source"
        self.figures.seconds = round(time.monotonic() - began, 1)
        if not self.back:
            left = [key for key in self.stock.scan_iter() if not key.startswith(b"_kombu.binding")]
            assert left in ([], [b"unacked_mutex"]), left

    def _is_idle(self) -> bool:
        queue: Any = self.apps["dq"]
        now = queue.dq.queues[NAME].snapshot(ages=False)
        counts = (now.waiting, now.delayed, now.held, now.discards, self.stock.exists(NAME, "unacked"))
        return not any(counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=10, help="runs of the command that are killed")
    parser.add_argument("--seed", type=int, default=os.getpid())
    parser.add_argument("--back", action="store_true", help="from the tenant broker to the stock one")
    given = parser.parse_args()
    with Move(given.messages, given.kills, given.seed, back=given.back) as move:
        figures = move.run()
    print(json.dumps({**asdict(figures), "seed": given.seed}, indent=2))
    return int(bool(figures.lost or figures.doubled))


if __name__ == "__main__":
    sys.exit(main())
