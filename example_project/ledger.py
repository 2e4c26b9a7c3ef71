"""Post a ledger by elected workers, kill and stop the leader on the way, and judge the running balance."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from books.judge import Line, Verdict, judge
from books.plan import Entry, entries
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.zookeeper import ZooKeeperServer
from day.brokers import DQ
from day.stage import HOME, Stage, StageError, Worker, poll

PATIENCE_S = 90.0
"""Seconds without a posting after which the run fails."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--postings", type=int, default=600, help="how many (600)")
    parser.add_argument("--workers", type=int, default=3, help="how many stand for election (3)")
    parser.add_argument("--kills", type=int, default=2, help="how often the leader is killed (2)")
    parser.add_argument("--stops", type=int, default=1, help="how often it is stopped, and goes on later (1)")
    parser.add_argument(
        "--zookeeper", action="store_true", help="ZooKeeper holds the election, not the broker"
    )
    parser.add_argument("--plain", action="store_true", help="no leader: see what goes wrong without one")
    parser.add_argument(
        "--session", type=float, default=3.0, help="seconds of silence after which a leader is replaced (3)"
    )
    parser.add_argument("--seed", type=int, default=1, help="other postings (1)")
    parser.add_argument("--out", type=Path, default=HOME / "out", help="directory for verdict and logs")
    return parser.parse_args(argv)


class Ledger:
    """A reader of the shop's SQLite file.

    Args:
        path: Path of the file; its tables must exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ask("insert into shop_fence (id, token, refused) values (1, 0, 0)")

    def _ask(self, query: str) -> list[tuple[object, ...]]:
        with contextlib.closing(sqlite3.connect(self._path, timeout=20)) as connection, connection:
            return connection.execute(query).fetchall()

    def lines(self) -> list[Line]:
        """Return all lines in the order of their posting."""
        columns = "number, kind, amount, balance, token, worker, posted_at"
        return [Line(*row) for row in self._ask(f"select {columns} from shop_posting order by id")]  # type: ignore[arg-type]

    def count(self) -> int:
        """Return the number of lines."""
        return int(str(self._ask("select count(*) from shop_posting")[0][0]))

    def leader(self) -> str:
        """Return the worker that wrote the last line."""
        return str(self._ask("select worker from shop_posting order by id desc limit 1")[0][0]).split("@")[0]

    def refused(self) -> int:
        """Return the number of refused postings with a stale token."""
        return int(str(self._ask("select refused from shop_fence")[0][0]))


class Run:
    """One run: workers, the publisher, faults."""

    def __init__(self, stage: Stage, ledger: Ledger, plan: list[Entry]) -> None:
        self._stage = stage
        self._ledger = ledger
        self._plan = plan
        self._workers: dict[str, Worker] = {}
        self._hired = 0

    def hire(self, count: int) -> None:
        """Start workers and wait until they consume, which makes them candidates."""
        for _ in range(count):
            self._hired += 1
            name = f"clerk{self._hired}"
            self._workers[name] = self._stage.worker(name, queue="ledger", pool="prefork", concurrency=1)
        for _ in poll(time.monotonic() + PATIENCE_S):
            if all(worker.is_ready() for worker in self._workers.values()):
                return
        raise StageError("the workers do not get ready")

    def publish(self) -> None:
        """Send all postings, in order."""
        import django

        django.setup()
        from shop.ledger import post

        for entry in self._plan:
            post.delay(*entry)

    def wait(self, count: int) -> None:
        """Wait until the given number of lines is posted."""
        seen, deadline = -1, time.monotonic() + PATIENCE_S
        while (posted := self._ledger.count()) < count:
            if posted != seen:
                seen, deadline = posted, time.monotonic() + PATIENCE_S
            if time.monotonic() > deadline:
                raise StageError(f"nothing was posted for {PATIENCE_S:g} s, after {posted} lines")
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill the leader, and start another worker instead."""
        name = self._ledger.leader()
        print(f"  after {self._ledger.count()} lines: SIGKILL for {name}, which leads")
        self._workers.pop(name).process.kill()
        self.hire(1)

    def stop(self) -> None:
        """Pause the leader for longer than its session, until another one has the term for a while."""
        name = self._ledger.leader()
        posted = self._ledger.count()
        print(
            f"  after {posted} lines: SIGSTOP for {name} and its pool, which lead; both go on 20 lines later"
        )
        worker = self._workers[name]
        with worker.process.paused():
            self.wait(min(posted + 20, len(self._plan)))


def run(chosen: argparse.Namespace) -> Verdict:
    """Post all lines, with faults meanwhile; return the verdict."""
    plan = entries(chosen.seed, chosen.postings)
    scratch = chosen.out.resolve() / "ledger"
    scratch.mkdir(parents=True, exist_ok=True)
    for old in scratch.iterdir():
        old.unlink()
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer(has_password=True))
        election = ""
        if chosen.zookeeper:
            election = f"zookeeper://{stack.enter_context(ZooKeeperServer()).hosts}/shop"
        os.environ.update(SHOP_ELECTION=election, SHOP_ELECTION_SESSION=str(chosen.session))
        if chosen.plain:
            os.environ["SHOP_PLAIN"] = "1"
        stage = stack.enter_context(Stage(DQ, redis.url(), "", scratch))
        os.environ.update(stage.environment)
        stage.migrate()
        ledger = Ledger(scratch / "shop.sqlite3")
        one = Run(stage, ledger, plan)
        one.hire(chosen.workers)
        one.publish()
        faults = [one.kill] * chosen.kills + [one.stop] * chosen.stops
        for number, fault in enumerate(faults, 1):
            one.wait(number * len(plan) // (len(faults) + 1))
            fault()
        one.wait(len(plan))
        return judge(plan, ledger.lines(), ledger.refused())


def text(verdict: Verdict, session: float, seconds: float) -> str:
    """Return the verdict as text."""
    lines = (
        f"{verdict.posted} lines, {len(verdict.missing)} missing, {verdict.disordered} out of order,",
        f"{verdict.wrong} with a wrong balance; the last balance is {verdict.balance / 100:,.2f}.\n",
        f"{verdict.terms} leaders, one after the other; {verdict.fallen} lines with a token that was over,",
        f"{verdict.refused} such postings turned away.\n",
        f"Seconds without a posting when the lead changed: {', '.join(map(str, verdict.pauses)) or '-'}",
        f"(the session is {session:g} s).\n",
        f"The ledger is {'right' if verdict.clean else 'WRONG'}. {seconds:.0f} s in all",
    )
    return " ".join(lines).replace("\n ", "\n")


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Raise an exception on SIGTERM, so that all processes are stopped."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    yield


def main(argv: list[str] | None = None) -> int:
    """Run the program. Return 0 for a correct ledger, 1 for a wrong one, 2 for an error."""
    chosen = arguments(argv)
    began = time.monotonic()
    try:
        with ended_by_sigterm():
            verdict = run(chosen)
    except (StageError, TimeoutError) as error:
        print(f"example: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("example: stopped", file=sys.stderr)
        return 130
    print(text(verdict, chosen.session, time.monotonic() - began))
    numbers = chosen.out.resolve() / "ledger" / "verdict.json"
    numbers.write_text(json.dumps(verdict.as_dict(), indent=2) + "\n", encoding="utf-8")
    print(numbers)
    return int(not verdict.clean)


if __name__ == "__main__":
    sys.exit(main())
