"""Consumers that are killed repeatedly while a producer puts items; no item may be lost.

``python -m tests.curator.kills --kills 200 --items 20000 --consumers 4 --seed 7``

A consumer records each item in its ledger file, with one write, as its last action for the item. At random
moments, a consumer gets SIGKILL and another one is started in its place. At the end, the queue must be empty,
and every item must be recorded:

* lost: an item was put and is in no ledger.
* twice: an item is in the ledgers more than once. A kill between the record and the finish of an item may
  cause this, for at most as many items as the killed consumer held (100).
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

from celery_dq.curator.queue import DistributedQueue
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.zookeeper.session import Session

ROOT = Path(__file__).resolve().parents[2]
QUEUE, LOCKS = "/mail", "/mail-locks"
#: Maximum number of nodes that a consumer holds.
HELD = 100
SESSION_S = 1.5


class Verdict(NamedTuple):
    put: int
    lost: list[int]
    twice: int
    kills: int
    took_s: float

    def __str__(self) -> str:
        return (
            f"{self.put} items, {self.kills} kills, {self.took_s:.0f} s: {len(self.lost)} lost, "
            f"{self.twice} consumed twice"
        )


def consume(hosts: str, ledger: Path) -> None:
    notes = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    pace = random.Random(os.getpid())

    def note(item: int) -> None:
        time.sleep(pace.uniform(0, 0.002))  # the work
        os.write(notes, b"%d\n" % item)

    session = Session(hosts, timeout_s=SESSION_S)
    DistributedQueue(session, QUEUE, lock_path=LOCKS, consumer=note, prefetch=HELD).start()
    # The parent's end closes this input; nothing is ever written to it.
    sys.stdin.read()


def start(hosts: str, ledger: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.curator.kills", "--consume", hosts, str(ledger)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def run(hosts: str, *, items: int, kills: int, consumers: int, seed: int) -> Verdict:
    """Put items, kill consumers, and count."""
    chance = random.Random(seed)
    began = time.monotonic()
    session = Session(hosts, timeout_s=10)
    queue = DistributedQueue(session, QUEUE, timeout_s=30)
    with tempfile.TemporaryDirectory(prefix="dq-kills-") as folder:
        ledgers = (Path(folder) / f"{number}.ledger" for number in range(10**6))

        def noted() -> Counter[int]:
            return Counter(
                int(line) for each in Path(folder).glob("*.ledger") for line in each.read_bytes().splitlines()
            )

        def has_begun(before: int) -> bool:
            return sum(noted().values()) > before or queue.size() == 0

        running = [start(hosts, next(ledgers)) for _each in range(consumers)]
        put = 0
        try:
            for killed in range(kills + 1):
                share = items * (killed + 1) // (kills + 1) - put
                queue.put_each(list(range(put, put + share)))
                put += share
                if killed == kills:
                    break
                victim = running.pop(chance.randrange(consumers))
                # The consumer must have started to work.
                before = sum(noted().values())
                wait_until(partial(has_begun, before), 60)
                time.sleep(chance.uniform(0, 0.05))  # at any moment of its work
                victim.kill()
                victim.communicate()
                running.append(start(hosts, next(ledgers)))
            wait_until(lambda: queue.size() == 0, 120, what=lambda: f"an empty queue: {queue.size()} left")
        finally:
            for process in running:
                process.kill()
                process.communicate()
        counts = noted()
    queue.close()
    session.close()
    lost = [number for number in range(put) if number not in counts]
    twice = sum(count - 1 for count in counts.values())
    return Verdict(put, lost, twice, kills, time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--consumers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--consume", nargs=2, metavar=("HOSTS", "LEDGER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.consume:
        consume(options.consume[0], Path(options.consume[1]))
        return 0
    with ZooKeeperServer(tick_ms=200) as server:
        verdict = run(
            server.hosts,
            items=options.items,
            kills=options.kills,
            consumers=options.consumers,
            seed=options.seed,
        )
    print(verdict)
    return bool(verdict.lost) or verdict.twice > verdict.kills * HELD


if __name__ == "__main__":
    sys.exit(main())
