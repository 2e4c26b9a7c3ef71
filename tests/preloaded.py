"""Programs that do not import Celery again: forks of a process that has imported it.

A worker or a command spends most of its CPU time on imports, and the tests start hundreds of them. Each test
process therefore has a *preloaded* process. The process has imported Celery and celery-dq, made no app and
started no thread. Its forks run a program as ``python -m``, ``python -c`` or ``python <file>`` does, in a
session of their own, and end as any interpreter does. For workers with a pool of gevent or eventlet, whose
patches come before all imports, there is another one for each, which has begun with these patches. It has
switched to no other greenlet.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from celery_dq.per_process import PerProcess
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.store.rights import ROLES
from celery_dq.transport.redis.store.script_calls import load_scripts

ROOT = Path(__file__).resolve().parent.parent

#: These import nearly all modules of a worker, and make no app.
MODULES = (
    *("celery.app.control", "celery.app.log", "celery.apps.worker", "celery.backends.redis"),
    *("celery.bin.celery", "celery.concurrency.prefork", "celery.concurrency.solo"),
    *("celery.concurrency.thread", "celery.events", "celery.fixups.django"),
    *("celery.worker.autoscale", "celery.worker.components"),
    *("celery.worker.consumer.delayed_delivery", "celery.worker.strategy", "kombu.pidbox"),
    *("kombu.transport.redis", "celery_dq.app.checks.doctor", "celery_dq.cli"),
    *("celery_dq.other_brokers.dedup_locks", "celery_dq.other_brokers.singleton_sequencer"),
    *("celery_dq.testing.servers", "celery_dq.transport.redis.transport"),
    *("celery_dq.transport.zookeeper.transport", "celery_dq.worker.allocation"),
    *("celery_dq.worker.bootsteps", "celery_dq.worker.evictions", "celery_dq.worker.probe_step"),
    *("celery_dq.worker.shutdown", "celery_dq.worker.singleton"),
    *("celery_dq.worker.zookeeper_step", "celery_dq.zookeeper.session", "tests.workers"),
)

#: A report of the preloaded process: the pid of a fork, and `STARTED` or its exit code.
REPORT = struct.Struct("ii")
STARTED = 1 << 20


#: Celery patches first, as its command line does. The functions without patches make no hub.
PROGRAM = """
import os, signal, socket, sys
native = os.fork, os.waitpid, signal.signal
control = socket.socket(fileno=int(sys.argv[1]))
import celery
celery.maybe_patch_concurrency(["-P", sys.argv[2]])
from tests.preloaded import main
main(control, *native)
"""


class PreloadedProcess:
    """A preloaded process of this test process, and the exit codes of its forks. Thread-safe.

    Args:
        pool: The pool of workers whose patches it has; another pool than gevent and eventlet has none.
    """

    def __init__(self, pool: str) -> None:
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}
        self._socket, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(other.fileno()), pool],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                # An interrupt from the terminal is for the test process, which then stops its workers.
                start_new_session=True,
            )

    def fork(self, *request: object) -> int:
        """Run a program, see `run_program`; returns the process id."""
        with self._lock:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            while True:
                pid, code = self._next_report()
                if code == STARTED:
                    return pid
                self._codes[pid] = code

    def exit_code(self, pid: int) -> int | None:
        """The exit code of a fork, negative for a signal; None while it runs."""
        with self._lock:
            while self._has_report():
                self._codes.update([self._next_report()])
            return self._codes.get(pid)

    def _has_report(self) -> bool:
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return bool(waiting.poll(0))

    def _next_report(self) -> tuple[int, int]:
        report = self._socket.recv(REPORT.size, socket.MSG_WAITALL)
        if len(report) < REPORT.size:
            raise RuntimeError(f"the preloaded process ended with {self._process.wait()}")
        pid, code = REPORT.unpack(report)
        return pid, code


PRELOADED = {pool: PerProcess(partial(PreloadedProcess, pool)) for pool in ("prefork", "gevent", "eventlet")}


class PythonFork:
    """A process ``python <words>`` with the methods of `subprocess.Popen`.

    Its output is added to `log`, and its errors too, unless they have a file of their own.
    """

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        errors: Path | None = None,
        folder: Path = ROOT,
        pool: str = "prefork",
    ) -> None:
        self.args = words
        log.touch()
        self._origin = PRELOADED.get(pool, PRELOADED["prefork"]).get()
        self.pid = self._origin.fork(words, dict(environment), str(folder), str(log), str(errors or log))

    def poll(self) -> int | None:
        return self._origin.exit_code(self.pid)

    def wait(self, timeout: float) -> int:
        try:
            wait_until(lambda: self.poll() is not None, timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(self.args, timeout) from None
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_python(
    *words: str, environment: Mapping[str, str] = os.environ, folder: Path = ROOT, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run ``python <words>`` as a fork to its end; returns its output as `subprocess.run` does."""
    with tempfile.TemporaryDirectory() as outputs:
        log, errors = Path(outputs, "log"), Path(outputs, "errors")
        fork = PythonFork(words, environment, log, errors=errors, folder=folder)
        try:
            code = fork.wait(timeout_s)
        finally:
            fork.kill()
        return subprocess.CompletedProcess(words, code, log.read_text(), errors.read_text())


def main(
    control: socket.socket,
    fork: Callable[[], int],
    waitpid: Callable[[int, int], tuple[int, int]],
    handle: Callable[[int, Any], object],
) -> None:
    """Fork on request, and report the forks that end, until the test process is gone.

    Args:
        control: The connection to the test process.
        fork: ``os.fork``, as the following ones without patches.
        waitpid: ``os.waitpid``.
        handle: ``signal.signal``.
    """

    def report_ends(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := waitpid(-1, os.WNOHANG))[0]:
                control.sendall(REPORT.pack(ended[0], os.waitstatus_to_exitcode(ended[1])))

    for module in MODULES:
        importlib.import_module(module)
    # The command line finds this command also when the package is not installed.
    sys.modules["celery.bin.celery"].celery.commands.setdefault("dq", sys.modules["celery_dq.cli"].dq)
    # Each worker reads these scripts, and which commands they use.
    load_scripts()
    next(role for role in ROLES if role.name == "worker").scripted  # noqa: B018 - it is cached
    # The collections of a fork, and its end, leave these objects alone, so that their memory stays shared.
    gc.freeze()
    # Reading goes on after the handler.
    handle(signal.SIGCHLD, report_ends)
    with control, control.makefile("rb") as requests:
        while request := requests.readline():
            if (pid := fork()) == 0:
                handle(signal.SIGCHLD, signal.SIG_DFL)
                break
            control.sendall(REPORT.pack(pid, STARTED))
        else:
            return
    run_program(*json.loads(request))


def run_program(
    words: Sequence[str], environment: Mapping[str, str], folder: str, log: str, errors: str
) -> None:
    """Run ``python <words>`` in this process."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for path, file in ((log, sys.stdout), (errors, sys.stderr)):
        with open(path, "ab") as output:
            os.dup2(output.fileno(), file.fileno())
    found = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [folder, *found, *(each for each in sys.path if each != str(ROOT))]
    if words[0] not in ("-c", "-m"):
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")
        return
    option, program, *arguments = words
    sys.argv[:] = [option, *arguments]
    if option == "-c":
        exec(program, {"__name__": "__main__"})
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
