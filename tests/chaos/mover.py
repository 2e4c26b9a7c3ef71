"""Changes of the partitions of the queue, each by a process of its own that is killed now and then."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO, TypeAlias

from celery import Celery
from kombu.exceptions import OperationalError

from celery_dq.app.api.broker import MapChanged
from celery_dq.errors import InvalidRequest, TenantMoving
from tests.brokers import Broker
from tests.chaos.tasks import NAME
from tests.workers import ENVIRONMENT, ROOT, app_from_environment, environment

#: The numbers of partitions, and the spreads of the heavy tenants, that are drawn.
NUMBERS = (3, 4, 6, 9, 12)
SPREADS = (1, 2, 3)
HEAVY = ("tenant-0", "tenant-1")
#: Tenants of which one task runs at once, in the order in which their messages were published.
IN_ORDER = ("tenant-2", "tenant-3", "tenant-4", "tenant-5")
#: Seconds after its start in which a mover is killed.
KILL_WITHIN_S = 0.4
#: Seconds between two attempts of a mover whose broker is away, or whose turn it is not.
RETRY_S = 0.05

#: A number of partitions, or a tenant and its spread.
Wanted: TypeAlias = "int | list[Any]"


def change(app: Any, wanted: Wanted) -> None:
    """Make a change. Complete another one before that, and wait for the broker if it is away."""
    while True:
        try:
            _make(app, wanted)
            return
        except (OperationalError, OSError, TenantMoving, InvalidRequest, MapChanged):
            _complete(app)
            time.sleep(RETRY_S)  # pace of the attempts


def _make(app: Any, wanted: Wanted) -> None:
    if isinstance(wanted, int):
        app.dq.queues[NAME].set_partitions(wanted, timeout=1)
    else:
        app.dq.quotas.set(NAME, wanted[0], spread=wanted[1], timeout=1)


def _complete(app: Any) -> None:
    """Go on with a change that is under way, perhaps of another mover."""
    with suppress(OperationalError, OSError, TenantMoving, InvalidRequest, MapChanged):
        with app.dq._broker.open(NAME) as opened:
            count = opened.homes.count
        app.dq.queues[NAME].set_partitions(count, timeout=1)


class Movers:
    """Draws changes, and runs the processes that make them.

    Args:
        broker: The broker.
        conf: Settings of an app on it.
        seed: Decides the changes and the kills.
    """

    def __init__(self, broker: Broker, conf: Mapping[str, Any], seed: int) -> None:
        self._environment = environment(broker, conf)
        self._draw = random.Random(f"movers-{seed}")
        self._errors: TextIO = tempfile.TemporaryFile("w+")  # noqa: SIM115 - of all movers
        #: Movers, each with its change and the time at which it is killed, 0 for never.
        self._running: list[tuple[subprocess.Popen[str], Wanted, float]] = []
        self.kills = 0

    def begin(self) -> None:
        for _ in range(self._draw.choice((1, 1, 2))):
            wanted: Wanted = self._draw.choice(NUMBERS)
            if self._draw.random() < 0.4:
                wanted = [self._draw.choice(HEAVY), self._draw.choice(SPREADS)]
            self._start(wanted, is_killed=self._draw.random() < 0.5)

    def _start(self, wanted: Wanted, *, is_killed: bool) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.mover", json.dumps(wanted)],
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.readline()  # it has imported everything
        kill_at = time.monotonic() + self._draw.uniform(0, KILL_WITHIN_S) if is_killed else 0.0
        self._running.append((process, wanted, kill_at))

    def tend(self) -> bool:
        """Kill the movers that are due, start others in their place; return whether all have ended."""
        for place in [*self._running]:
            process, wanted, kill_at = place
            if process.poll() is None and not (kill_at and time.monotonic() >= kill_at):
                continue
            self._running.remove(place)
            if process.poll() is None:
                process.kill()
                self.kills += 1
                self._start(wanted, is_killed=False)
            elif process.returncode:
                self._errors.seek(0)
                raise RuntimeError(f"a mover failed at {wanted}:\n{self._errors.read()}")
            self._close(process)
        return not self._running

    def stop(self) -> None:
        for process, _, _ in self._running:
            process.kill()
            self._close(process)
        self._running.clear()
        self._errors.close()

    @staticmethod
    def _close(process: subprocess.Popen[str]) -> None:
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def prepare(app: Any) -> None:
    """Give the tenants in order their quotas."""
    for tenant in IN_ORDER:
        app.dq.quotas.set(NAME, tenant, concurrency=1)


if __name__ == "__main__" and ENVIRONMENT in os.environ:
    mover: Celery = app_from_environment(NAME)
    print("ready", flush=True)
    change(mover, json.loads(sys.argv[1]))
