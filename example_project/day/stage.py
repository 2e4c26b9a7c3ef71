"""The stage: every process of a day, started here and stopped here by its id."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import celery_dq
from day.brokers import QUEUE, Broker

HOME = Path(__file__).resolve().parent.parent
THREADS = 8
"""Threads per worker."""


class StageError(RuntimeError):
    """A process of the example did not come up, or died; the message names its log."""


class Stage:
    """The processes of one day.

    :param broker: which broker the Celery processes use
    :param broker_redis: URL of its Redis
    :param ledger: URL of the ledger's Redis
    :param scratch: directory for logs, the SQLite file and ready marks; must exist
    """

    def __init__(self, broker: Broker, broker_redis: str, ledger: str, scratch: Path) -> None:
        self._broker = broker
        self._ledger = ledger
        self._scratch = scratch
        self._stack = contextlib.ExitStack()
        package_root = Path(celery_dq.__file__ or "").resolve().parent.parent
        self._env = {
            **os.environ,
            "SHOP_BROKER_URL": broker.url(broker_redis),
            "SHOP_DATABASE": str(scratch / "shop.sqlite3"),
            "DJANGO_SETTINGS_MODULE": "project.settings",
            "PYTHONPATH": os.pathsep.join([str(HOME), str(package_root)]),
            "PYTHONUNBUFFERED": "1",
        }

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def migrate(self) -> None:
        """Create the tables."""
        self.wait(self.manage("migrate", "--verbosity", "0"), "migrate", 60)

    def endpoints(self) -> dict[str, list[int]]:
        """Start the merchants' endpoints; return their ports by class."""
        process = self._start(
            "endpoints",
            [sys.executable, "-m", "day.endpoints", "--ledger", self._ledger, "--day", self._broker.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise StageError(f"the endpoints did not start, see {self._scratch / 'endpoints.log'}")
        ports: dict[str, list[int]] = json.loads(line)
        return ports

    def replay(
        self, ports: dict[str, list[int]], seed: int, merchants: int, minutes: float
    ) -> subprocess.Popen[bytes]:
        """Start the shop."""
        return self.manage(
            "replay_day",
            *("--seed", str(seed), "--merchants", str(merchants), "--minutes", str(minutes)),
            *("--endpoints", json.dumps(ports), "--ledger", self._ledger, "--day", self._broker.name),
        )

    def manage(self, command: str, *options: str) -> subprocess.Popen[bytes]:
        """Start a management command."""
        return self._start(command, [sys.executable, "manage.py", command, *options])

    def worker(self, name: str) -> Worker:
        """Start a Celery worker."""
        ready = self._scratch / f"{name}.ready"
        command = [sys.executable, "-m", "celery", "-A", "project", "worker", "-Q", QUEUE, "-n", f"{name}@%h"]
        process = self._start(
            name,
            [*command, "--pool", "threads", "--concurrency", str(THREADS), "--loglevel", "WARNING"],
            env={"SHOP_READY_FILE": str(ready)},
        )
        return Worker(name, process, ready)

    def wait(self, process: subprocess.Popen[bytes], name: str, deadline: float) -> None:
        """Wait until a process has ended well."""
        try:
            code = process.wait(deadline)
        except subprocess.TimeoutExpired:
            raise StageError(
                f"{name} takes longer than {deadline:g} s, see {self._scratch / name}.log"
            ) from None
        if code:
            raise StageError(f"{name} ended with exit code {code}, see {self._scratch / name}.log")

    def _start(
        self,
        name: str,
        command: list[str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        env: dict[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        log: IO[bytes] = self._stack.enter_context((self._scratch / f"{name}.log").open("wb"))
        process = subprocess.Popen(
            command,
            cwd=HOME,
            env={**self._env, **(env or {})},
            stdin=stdin,
            stdout=log if stdout is None else stdout,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches the runner alone, which stops the others in order
        )
        self._stack.callback(stop, process)
        return process


class Worker:
    """A Celery worker process."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], ready: Path) -> None:
        self.name = name
        self.process = process
        self._ready = ready

    def is_ready(self) -> bool:
        """Tell whether it consumes.

        :raises StageError: when it has died
        """
        if self.process.poll() is not None:
            raise StageError(
                f"{self.name} ended with exit code {self.process.returncode}, see {self.name}.log"
            )
        return self._ready.exists()

    def kill(self) -> None:
        """Kill it, without a chance to say goodbye."""
        self.process.kill()
        self.process.wait()


def stop(process: subprocess.Popen[bytes], patience: float = 15.0) -> None:
    """Stop a process: ask first, then kill."""
    if process.stdin:
        process.stdin.close()
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout:
        process.stdout.close()


def poll(deadline: float, interval: float = 0.05) -> Iterator[None]:
    """Yield now and then until ``deadline`` (on the monotonic clock)."""
    while time.monotonic() < deadline:
        yield
        time.sleep(interval)
