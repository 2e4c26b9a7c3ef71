"""The processes of a day, which are started here and stopped by their ids."""

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
    """A process of the example did not start, or died; the text quotes its log."""


class Stage:
    """The processes of one day.

    Args:
        broker: The broker that the Celery processes use.
        broker_redis: URL of its Redis.
        ledger: URL of the ledger's Redis.
        scratch: Directory for logs, the SQLite file and ready marks; must exist.
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

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the processes."""
        return dict(self._env)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def migrate(self) -> None:
        """Create the tables."""
        self._start("migrate", [sys.executable, "manage.py", "migrate", "--verbosity", "0"]).wait(60)

    def endpoints(self) -> dict[str, list[int]]:
        """Start the merchants' endpoints; return their ports by class."""
        process = self._start(
            "endpoints",
            [sys.executable, "-m", "day.endpoints", "--ledger", self._ledger, "--day", self._broker.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.popen.stdout is not None
        line = process.popen.stdout.readline()
        if not line:
            raise process.trouble("did not start")
        ports: dict[str, list[int]] = json.loads(line)
        return ports

    def shop(self, ports: dict[str, list[int]], seed: int, merchants: int, minutes: float) -> Process:
        """Start the shop, which replays the day."""
        return self._start(
            "shop",
            [
                *(sys.executable, "manage.py", "replay_day", "--seed", str(seed)),
                *("--merchants", str(merchants), "--minutes", str(minutes), "--endpoints", json.dumps(ports)),
                *("--ledger", self._ledger, "--day", self._broker.name),
            ],
        )

    def worker(
        self, name: str, queue: str = QUEUE, pool: str = "threads", concurrency: int = THREADS
    ) -> Worker:
        """Start a Celery worker."""
        ready = self._scratch / f"{name}.ready"
        process = self._start(
            name,
            [
                *(sys.executable, "-m", "celery", "-A", "project", "worker", "-Q", queue, "-n", f"{name}@%h"),
                *("--pool", pool, "--concurrency", str(concurrency), "--loglevel", "WARNING"),
            ],
            env={"SHOP_READY_FILE": str(ready)},
        )
        return Worker(process, ready)

    def dashboard(self) -> str:
        """Start the dashboard of the queues; return its line with the URL."""
        process = self._start(
            "dashboard",
            [sys.executable, "-m", "celery", "-A", "project", "dq", "web", "--port", "0"],
            stdout=subprocess.PIPE,
        )
        assert process.popen.stdout is not None
        line = process.popen.stdout.readline().decode().strip()
        if not line:
            raise process.trouble("did not start")
        return line

    def _start(
        self,
        name: str,
        command: list[str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        env: dict[str, str] | None = None,
    ) -> Process:
        path = self._scratch / f"{name}.log"
        log: IO[bytes] = self._stack.enter_context(path.open("wb"))
        popen = subprocess.Popen(
            command,
            cwd=HOME,
            env={**self._env, **(env or {})},
            stdin=stdin,
            stdout=log if stdout is None else stdout,
            stderr=log,
            start_new_session=True,  # Ctrl-C must reach the runner only, which stops its processes
        )
        process = Process(name, popen, path)
        self._stack.callback(process.stop)
        return process


class Process:
    """A process of the example and its log."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.popen = popen
        self._log = log

    def trouble(self, what: str) -> StageError:
        """Return an error about the process, with the last line of its log."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "(nothing)")
        return StageError(f"{self.name} {what}. Its last words: {last} (more in {self._log})")

    def check(self) -> None:
        """Raise :exc:`StageError` when the process ended with an error."""
        if self.popen.poll():
            raise self.trouble(f"ended with exit code {self.popen.returncode}")

    def wait(self, patience: float) -> None:
        """Wait until the process has ended; raise :exc:`StageError` for a timeout or an error."""
        try:
            self.popen.wait(patience)
        except subprocess.TimeoutExpired:
            raise self.trouble(f"takes longer than {patience:g} s") from None
        self.check()

    def kill(self) -> None:
        """Kill the process by SIGKILL."""
        self.popen.kill()
        self.popen.wait()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the process and its children, and continue them at the end of the block."""
        os.killpg(self.popen.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.popen.pid, signal.SIGCONT)

    def stop(self, patience: float = 15.0) -> None:
        """Stop the process by SIGTERM, and after a timeout by SIGKILL. Idempotent."""
        if self.popen.stdin:
            self.popen.stdin.close()
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(patience)
            except subprocess.TimeoutExpired:
                self.kill()
        if self.popen.stdout:
            self.popen.stdout.close()


class Worker:
    """A Celery worker."""

    def __init__(self, process: Process, ready: Path) -> None:
        self.process = process
        self._ready = ready

    def is_ready(self) -> bool:
        """Return whether the worker consumes; raise :exc:`StageError` when it has died."""
        self.process.check()
        return self._ready.exists()


def poll(deadline: float, interval: float = 0.05) -> Iterator[None]:
    """Yield repeatedly, with pauses, until ``deadline`` (on the monotonic clock)."""
    while time.monotonic() < deadline:
        yield
        time.sleep(interval)
