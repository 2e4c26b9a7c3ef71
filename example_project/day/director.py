"""The run of one day on one broker, from the first process to the verdict."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from day.brokers import DQ, Broker, left_behind
from day.judge import Kill, Sample, Verdict, judge, lag, samples
from day.ledger import Arrival, Ledger, Published
from day.plan import KILL_AT, clock, plan, seconds
from day.progress import Progress
from day.stage import Stage, StageError, Worker, poll

WORKERS = 2
SILENCE = 6.0
"""Seconds without a request at any endpoint after which the day ends."""
LONGEST_DRAIN = 45.0
"""Seconds after the last order at which the run ends in any case."""


@dataclass(frozen=True)
class Options:
    """Options of the run, see the command line.

    ``patience`` is the time in seconds that the run waits at least for the messages of the killed worker.
    """

    seed: int
    merchants: int
    minutes: float
    patience: float
    out: Path


@dataclass(frozen=True)
class Day:
    """A finished day.

    ``kill_at`` and ``drained_at`` are seconds into the day, ``wall`` is the length of the whole run. ``lag``
    is the longest delay of the shop itself in seconds, because publishing takes time too.
    """

    broker: Broker
    verdict: Verdict
    samples: list[Sample]
    kill_at: float
    drained_at: float
    lag: float
    wall: float


def run_day(broker: Broker, options: Options, ledger_url: str) -> Day:
    """Run one day.

    Raises:
        StageError: A process ended with an error.
        TimeoutError: A process did not start in time.
    """
    started = time.monotonic()
    scratch = options.out / broker.name
    scratch.mkdir(parents=True, exist_ok=True)
    for old in scratch.iterdir():
        old.unlink()
    ledger = Ledger(ledger_url, broker.name)
    progress = Progress(broker.title)
    try:
        with RedisServer(has_password=True) as server:
            with Stage(broker, server.url(), ledger_url, scratch) as stage:
                show = Show(stage, ledger, progress, options, broker is DQ)
                show.open()
                kill = show.run()
                drained = time.time()
                show.close()
            held, queued = left_behind(broker, server.url())
        published, arrivals = ledger.read()
        keep(scratch / "published.jsonl", published)
        keep(scratch / "arrivals.jsonl", arrivals)
    finally:
        progress.close()
        ledger.close()
    return Day(
        broker,
        judge(published, arrivals, kill, held, queued),
        samples(published, arrivals, show.began),
        kill.at - show.began,
        drained - show.began,
        lag(published, plan(options.seed, options.merchants, options.minutes), show.began),
        time.monotonic() - started,
    )


def keep(path: Path, rows: Sequence[Published] | Sequence[Arrival]) -> None:
    """Write one part of the ledger to a file, with a line of JSON per row."""
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")


class Show:
    """One day while it runs."""

    def __init__(
        self, stage: Stage, ledger: Ledger, progress: Progress, options: Options, with_dashboard: bool
    ) -> None:
        self._stage = stage
        self._ledger = ledger
        self._progress = progress
        self._options = options
        self._with_dashboard = with_dashboard
        self._length = options.minutes * 60
        self._workers: list[Worker] = []
        self.began = 0.0

    def open(self) -> None:
        """Start all processes and the replay."""
        self._progress.print_line(f"starting {WORKERS} workers, the endpoints and the shop")
        self._workers = [self._stage.worker(f"worker{number}") for number in range(1, WORKERS + 1)]
        self._stage.migrate()
        ports = self._stage.endpoints()
        for worker in self._workers:
            wait_until(worker.is_ready, 60, what=f"{worker.process.name} consumes")
        if self._with_dashboard:
            self._progress.print_line(self._stage.dashboard())
        options = self._options
        self._shop = self._stage.shop(ports, options.seed, options.merchants, options.minutes)
        wait_until(self._has_begun, 60, what="the shop opens")

    def run(self) -> Kill:
        """Kill a worker during the day. Return when all notices are settled or no request comes any more."""
        kill: Kill | None = None
        arrived, moved = 0, time.time()
        remark = ""
        for _ in poll(time.monotonic() + self._length + LONGEST_DRAIN):
            now = time.time()
            count = self._ledger.count()
            if kill is None and now >= self.began + seconds(KILL_AT, self._options.minutes):
                kill = self._kill_one()
                remark = f"{self._workers[0].process.name} killed"
            if (so_far := self._ledger.arrived()) != arrived:
                arrived, moved = so_far, now
            at = now - self.began
            self._progress.show(
                at / self._length, clock(at, self._options.minutes), count.published, count.settled, remark
            )
            if kill and count.finished:
                still = now - moved > SILENCE and now - kill.at > self._options.patience
                if count.settled == count.published or still:
                    return kill
            for process in [self._shop, *(worker.process for worker in self._workers[1:])]:
                process.check()
        if kill is None:
            raise StageError("the day was over before a worker could be killed")
        return kill

    def close(self) -> None:
        """Stop the shop and the workers by a warm shutdown."""
        self._shop.wait(60)
        for worker in self._workers[1:]:
            worker.process.stop()

    def _has_begun(self) -> bool:
        self._shop.check()
        self.began = self._ledger.began() or 0.0
        return self.began > 0

    def _kill_one(self) -> Kill:
        doomed = self._workers[0].process
        doomed.kill()
        kill = Kill(doomed.popen.pid, time.time())
        self._workers.append(self._stage.worker(f"worker{WORKERS + 1}"))
        return kill
