"""Real ``celery worker`` processes: started, waited for, stopped, and never left behind."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from celery import Celery
from celery.signals import worker_ready

from celery_dq.clock import SystemClock
from celery_dq.testing.waiting import wait_until
from tests.brokers import BROKERS, Broker
from tests.log_watch import WATCH
from tests.preloaded import PythonFork

ROOT = Path(__file__).resolve().parent.parent

#: The environment variable that describes the app of a worker process (JSON).
ENVIRONMENT = "DQ_TEST_APP"

#: The line that a test worker prints, at any log level, once it consumes.
READY = "<the worker consumes>"

#: How the stack of a process begins that `faulthandler` writes.
TRACE = "(most recent call first)"


def make_app(name: str, broker: Broker | None, conf: Mapping[str, Any]) -> Celery:
    """A Celery app on `broker` (None: the one in `conf`); the caller and the worker build the same one."""
    app = Celery(name, set_as_current=False)
    app.conf.update(
        {
            "broker_connection_retry_on_startup": True,
            "worker_hijack_root_logger": True,
            "worker_prefetch_multiplier": 1,
            "task_default_queue": name,
            **conf,
        }
    )
    if broker is not None:
        broker.prepare_app(app)
    return app


def app_from_environment(name: str) -> Celery:
    """The app that `WorkerProcess` described to this process, a worker."""
    described = json.loads(os.environ[ENVIRONMENT])
    broker = BROKERS[described["broker"]] if described["broker"] else None
    worker_ready.connect(_report_ready, weak=False)
    # Unlike Celery's handler of SIGUSR1, it needs no turn of the interpreter, and pool children have it too.
    faulthandler.register(signal.SIGUSR2)
    ahead_s = described["conf"].get("clock_ahead_s", 0)
    if ahead_s:
        _set_the_clock(ahead_s)
    return make_app(name, broker, described["conf"])


def _set_the_clock(ahead_s: float) -> None:
    """Let the wall clock of this process be ahead, as Celery and celery-dq read it."""
    celery_now, wall = Celery.now, SystemClock.wall
    celery: Any = Celery
    celery.now = lambda self: celery_now(self) + timedelta(seconds=ahead_s)
    clock: Any = SystemClock
    clock.wall = staticmethod(lambda: wall() + ahead_s)


def _report_ready(sender: Any, **_: Any) -> None:
    # Celery says so itself, but only at INFO.
    print(READY, flush=True)


def environment(broker: Broker | None, conf: Mapping[str, Any]) -> dict[str, str]:
    """The environment of a process that is to build the app `conf` on `broker`."""
    described = json.dumps({"broker": broker.name if broker else "", "conf": dict(conf)})
    return {**os.environ, ENVIRONMENT: described, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


class WorkerProcess:
    """One ``celery worker`` in a session of its own, with its log in a file.

    A preloaded one is cheaper: see `tests.preloaded`. A worker that is measured is a fresh process, as the
    workers of users are.
    """

    def __init__(
        self,
        module: str,
        *,
        broker: Broker | None,
        conf: Mapping[str, Any],
        pool: str = "prefork",
        concurrency: int = 2,
        name: str = "w1",
        queues: Sequence[str] = (),
        arguments: Sequence[str] = ("--without-mingle", "--without-gossip", "--without-heartbeat"),
        loglevel: str = "INFO",
        preloaded: bool = False,
    ) -> None:
        self.name = f"{name}@proof"
        self.pool = pool
        self._is_fork = preloaded
        self._is_ours = str(conf.get("broker_url", "")).startswith("dq-")
        self._arguments = ["-A", module, "worker", "-P", pool, "-c", str(concurrency)]
        self._arguments += ["-n", self.name, "-l", loglevel, *arguments]
        if queues:
            self._arguments += ["-Q", ",".join(queues)]
        self._environment = environment(broker, conf)
        descriptor, path = tempfile.mkstemp(prefix=f"worker-{pool}-", suffix=".log")
        os.close(descriptor)
        self._log_path = Path(path)
        WATCH.watch(self._log_path)
        self.process: subprocess.Popen[bytes] | PythonFork | None = None

    # Life.

    def start(self) -> WorkerProcess:
        """Start the process; returns at once."""
        assert not self.alive, "it runs already, and would be left behind"
        if self._is_fork:
            words = ["-m", "celery", *self._arguments]
            self.process = PythonFork(words, self._environment, self._log_path, pool=self.pool)
            return self
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "celery", *self._arguments],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def wait_ready(self, deadline: float = 60.0) -> WorkerProcess:
        """Wait until the worker consumes."""
        self.wait_for_log(READY, deadline)
        return self

    def wait_for_log(self, text: str, deadline: float = 30.0, occurrences: int = 1) -> None:
        """Wait until the log holds `text` that many times."""

        def there() -> bool:
            if self.log.count(text) >= occurrences:
                return True
            if not self.alive:
                raise RuntimeError(f"worker {self.name} ended with {self.returncode}:\n{self.log}")
            return False

        wait_until(there, deadline)

    def stop(self, how: signal.Signals = signal.SIGTERM, deadline: float = 25.0) -> int:
        """Send `how` and wait for the end; returns the exit code."""
        assert self.process is not None
        if self.alive:
            self.process.send_signal(how)
        return self.wait(deadline)

    def wait(self, deadline: float = 25.0) -> int:
        """Wait for the end; returns the exit code. If the worker does not end, its log shows where it is."""
        assert self.process is not None
        try:
            return self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            for process in [psutil.Process(self.pid), *self.children()]:
                traces = self.log.count(TRACE)
                process.send_signal(signal.SIGUSR2)
                with contextlib.suppress(TimeoutError):
                    self.wait_for_log(TRACE, 2, traces + 1)
            raise

    def _stop_if_it_can(self, deadline: float = 10.0) -> None:
        """Send SIGTERM, and wait a while.

        This is a clean-up; a test of the shutdown itself calls `stop` or `wait`. A stopping Celery
        forgets each job whose start its loop has not read yet, and reads no more from that child. But the
        child waits half a minute for an answer (billiard's `_ensure_messages_consumed`), and Celery for the
        child: one task that has just ended is enough. With celery-dq such a job is kept
        (celery_dq/compat/prefork_pool.py), and the worker has to end.
        """
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(deadline)

    def discard(self) -> None:
        """Kill the rest of the process group, and drop the log."""
        if self.process is not None:
            descendants = self.children() if self.alive else []
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            for child in descendants:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            self.process.wait(30)
        WATCH.drop(self._log_path)
        self._log_path.unlink(missing_ok=True)

    # Looking.

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def returncode(self) -> int | None:
        return None if self.process is None else self.process.poll()

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        """The pool's processes (and any other child)."""
        try:
            found: list[psutil.Process] = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return found

    # As a context manager: a test that fails shows the log.

    def __enter__(self) -> WorkerProcess:
        return self.start().wait_ready()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.alive and self._is_ours:
                self.stop()
            elif kind is None and self.alive:
                self._stop_if_it_can()
        finally:
            if error is not None:
                error.add_note(f"log of {self.name}:\n{self.log[-16000:]}") if hasattr(
                    error, "add_note"
                ) else print(self.log[-16000:])
            self.discard()
