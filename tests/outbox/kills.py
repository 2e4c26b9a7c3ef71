"""Callers, relays and brokers that are killed repeatedly, over one outbox on PostgreSQL.

``python -m tests.outbox.kills --kills 200 --seed 7``

Callers order in transactions, and kill themselves before and after a commit. Some transactions and savepoints
are rolled back. Two workers relay. They are killed before and after a batch and at random times, and are
stopped for longer than their term. The broker is killed and restarted, and the sessions of the database are
cut off. At the end the rows of the orders, which were written in the same transactions, are compared with
the broker:

* lost: an order is in the database, and its call is not in the broker;
* twice: a call is in the broker more than once;
* rolled back: a call is in the broker, and its order is not in the database;
* out of order: a call is in the broker before an earlier call of the same caller.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.databases import PostgreSQLServer
from tests.outbox.outbox_shop import OutboxShop
from tests.outbox.shop.caller import MOST
from tests.preloaded import PythonFork

SETTINGS = {"dq_election_session": 1, "dq_buffer_batch_size": 20, "dq_outbox_poll": "10ms"}
CUT = """
with connections["default"].cursor() as cursor:
    cursor.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE pid <> pg_backend_pid() AND datname = current_database()"
    )
"""


@dataclass
class OutboxVerdict:
    """The result of a run."""

    orders: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)
    twice: list[int] = field(default_factory=list)
    rolled_back: list[int] = field(default_factory=list)
    disordered: list[int] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether each committed call is in the broker once, and no other call is."""
        return not (self.lost or self.twice or self.rolled_back or self.disordered)

    def __str__(self) -> str:
        kills = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kills.items()))
        return (
            f"{sum(self.kills.values())} kills ({kills}), {self.orders} orders: lost {len(self.lost)}, twice "
            f"{len(self.twice)}, rolled back {len(self.rolled_back)}, out of order {len(self.disordered)}"
        )


def judge_outbox(verdict: OutboxVerdict, orders: Sequence[int], calls: Sequence[int]) -> OutboxVerdict:
    """Compare the orders with the calls in the broker, which are in its order."""
    committed, counts = set(orders), Counter(calls)
    verdict.orders = len(orders)
    verdict.lost = sorted(committed - counts.keys())
    verdict.twice = sorted(number for number, count in counts.items() if count > 1)
    verdict.rolled_back = sorted(counts.keys() - committed)
    last: dict[int, int] = {}
    for number in calls:
        caller = number // MOST
        if number < last.get(caller, number):
            verdict.disordered.append(number)
        last[caller] = max(last.get(caller, number), number)
    return verdict


class KillRun:
    """One run.

    Args:
        shop: The project.
        broker: Its broker, which keeps its data when it is killed.
        seed: Decides the faults.
    """

    def __init__(self, shop: OutboxShop, broker: RedisServer, seed: int) -> None:
        self._shop = shop
        self._broker = broker
        self._chance = random.Random(seed)
        self._callers: list[PythonFork] = []
        self._relays: list[PythonFork] = []
        self._born = 0
        self._trouble_at = 0.0
        self.verdict = OutboxVerdict()

    def run(self, kills: int, seconds: float) -> OutboxVerdict:
        """Kill processes, then wait until the outbox is empty, and judge."""
        deadline = time.monotonic() + seconds
        try:
            while sum(self.verdict.kills.values()) < kills and time.monotonic() < deadline:
                self._reap()
                while len(self._callers) < 3:
                    self._callers.append(self._spawn_caller())
                while len(self._relays) < 2:
                    self._relays.append(self._spawn_relay())
                if time.monotonic() >= self._trouble_at:
                    self._trouble_at = time.monotonic() + self._chance.uniform(0.3, 1.5)
                    self._trouble()
                time.sleep(0.01)  # the pace of the faults
        finally:
            for process in (*self._callers, *self._relays):
                process.kill()
                process.wait(30)
        with self._shop.worker(queues="other", **SETTINGS):
            wait_until(lambda: self._shop.rows() == 0, 120, what="the outbox to be empty", interval_s=0.1)
        orders = self._shop.run("answer = [each.number for each in Order.objects.all()]")
        return judge_outbox(self.verdict, orders, self._shop.waiting())

    def _spawn_caller(self) -> PythonFork:
        self._born += 1
        words = ["-m", "tests.outbox.shop.caller", str(self._born), str(self._chance.randrange(10**9))]
        return PythonFork(words, self._shop.variables({}), self._shop.folder / "callers.log")

    def _spawn_relay(self) -> PythonFork:
        moment = self._chance.choice(("before", "after", ""))
        settings = {**SETTINGS, "SHOP_KILL": f"{moment} {self._chance.randint(1, 30)}" if moment else ""}
        name = f"relay-{uuid.uuid4().hex[:6]}"
        words = ["-m", "celery", "-A", "tests.outbox.shop.celery", "worker", "-P", "solo", "-n", name]
        words += ["-Q", "other", "-l", "INFO", "--without-mingle", "--without-gossip"]
        return PythonFork(words, self._shop.variables(settings), self._shop.folder / f"{name}.log")

    def _reap(self) -> None:
        for kind, processes in (("of a caller", self._callers), ("of a relay", self._relays)):
            for process in [each for each in processes if each.poll() is not None]:
                processes.remove(process)
                if process.poll() != -signal.SIGKILL:
                    raise AssertionError(f"a process ended by itself, see {self._shop.folder}")
                self.verdict.kills[kind] += 1

    def _trouble(self) -> None:
        kind = self._chance.choice(("relay", "stop", "broker", "database"))
        if kind == "relay" and self._relays:
            self._chance.choice(self._relays).kill()
        elif kind == "stop" and self._relays:
            stopped = self._chance.choice(self._relays)
            stopped.send_signal(signal.SIGSTOP)
            time.sleep(self._chance.uniform(0.2, 2.0))  # longer than a term, now and then
            stopped.send_signal(signal.SIGCONT)
        elif kind == "broker":
            self._broker.kill()
            self._broker.start()
            self.verdict.kills["of the broker"] += 1
        else:
            self._shop.run(CUT)
            self.verdict.kills["of all database sessions"] += 1


def main() -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=900, help="end earlier than that")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    with (
        RedisServer(appendonly=True) as broker,
        PostgreSQLServer() as databases,
        tempfile.TemporaryDirectory() as folder,
    ):
        databases.make_database("shop")
        settings = {"default": databases.settings("shop")}
        shop = OutboxShop.made(settings, broker.url(scheme="dq-redis"), Path(folder))
        try:
            verdict = KillRun(shop, broker, options.seed).run(options.kills, options.seconds)
        finally:
            shop.close()
    print(f"seed {options.seed}: {verdict}")
    for kind in ("lost", "twice", "rolled_back", "disordered"):
        if found := getattr(verdict, kind):
            print(kind, found[:20])
    return 0 if verdict.clean else 1


if __name__ == "__main__":
    sys.exit(main())
