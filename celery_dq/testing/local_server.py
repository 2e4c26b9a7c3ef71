"""The base class of local servers: start of a process, wait for its service, end, and clean-up.

A server of another kind is a subclass with methods that start its process and check whether it serves:

.. code-block:: python

    class MemcachedServer(LocalServer):
        name = "memcached"

        def _run(self):
            command = ["memcached", "-l", "127.0.0.1", "-p", str(self.port)]
            return ChildProcess(command, log=self.log_file, folder=self.folder)

        def _serves(self):
            with socket.create_connection(("127.0.0.1", self.port), 1.0):
                return True
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import signal
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

from celery_dq.per_process import OwnerProcess
from celery_dq.testing.processes import ChildProcess, free_port, is_free
from celery_dq.testing.waiting import wait_until

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LocalServer", "ServerGroup", "free_ports"]

#: Number of starts with new free ports, when another process takes a port first.
ATTEMPTS = 5


class PortTaken(RuntimeError):
    """A server did not start, because another process has its port."""


def free_ports(count: int) -> tuple[int, ...]:
    """Return `count` different ports that are free now."""
    found: dict[int, None] = {}
    while len(found) < count:
        found[free_port()] = None
    return tuple(found)


class Startable(ABC):
    """An object that a ``with`` block starts and stops; or call :meth:`start` and :meth:`stop`."""

    @abstractmethod
    def start(self) -> Self:
        """Start the object, wait until it serves, and return it."""

    @abstractmethod
    def stop(self) -> None:
        """End the object and remove its data. Idempotent."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class ServerGroup(Startable):
    """Several servers that start and stop together.

    Attributes:
        servers: The servers, in the order of their end.
    """

    servers: Sequence[LocalServer]

    @abstractmethod
    def _start_all(self) -> None:
        """Start the servers, and wait until they serve together."""

    def start(self) -> Self:
        """Start the servers, and wait until they serve together."""
        try:
            self._start_all()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End all servers and remove their data. Idempotent."""
        for server in self.servers:
            server.stop()


class LocalServer(Startable):
    """A server on ports of 127.0.0.1, with its data in a temporary folder.

    It ends with the ``with`` block or the process, even if the process is killed.

    Args:
        ports: Number of free ports that it needs, or the ports themselves. The first is for clients. Free
            ports are chosen at the first start and stay the same over restarts.

    Attributes:
        name: Kind of the server, for the names of its folder and its log, and for errors.
        start_timeout_s: Timeout of a start in seconds.
        stop_timeout_s: Seconds between SIGTERM and SIGKILL.
    """

    name: ClassVar[str]
    start_timeout_s: ClassVar[float] = 30.0
    stop_timeout_s: ClassVar[float] = 5.0

    def __init__(self, ports: int | Sequence[int] = 1) -> None:
        self._wanted = ports if isinstance(ports, int) else len(ports)
        self._ports = () if isinstance(ports, int) else tuple(ports)
        self._child: ChildProcess | None = None
        self._folder: Path | None = None
        self._owner = OwnerProcess()

    # -- for subclasses

    @abstractmethod
    def _run(self) -> ChildProcess:
        """Start the process. The folder and the ports exist when this is called."""

    @abstractmethod
    def _serves(self) -> bool:
        """Return whether the server serves. Called repeatedly; an OSError counts as no."""

    # -- addresses, log and state

    @property
    def folder(self) -> Path:
        """Folder of its data and its log, from :meth:`start` to :meth:`stop`."""
        if self._folder is None:
            raise RuntimeError("the server was not started")
        return self._folder

    @property
    def ports(self) -> tuple[int, ...]:
        """Ports on 127.0.0.1, from the first :meth:`start` on."""
        if len(self._ports) < max(self._wanted, 1):
            raise RuntimeError("the server has no port: it was not started, or listens on none")
        return self._ports

    @property
    def port(self) -> int:
        """Port on 127.0.0.1 for clients, from the first :meth:`start` on."""
        return self.ports[0]

    @property
    def pid(self) -> int:
        """Process id while the server runs."""
        return self._running().pid

    @property
    def log_file(self) -> Path:
        """Path of its log."""
        return self.folder / f"{self.name}.log"

    @property
    def log(self) -> str:
        """Text of its log so far."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def alive(self) -> bool:
        """Return whether its process exists, paused or not."""
        return self._child is not None and self._child.alive()

    # -- start and stop

    def start(self) -> Self:
        """Start the server and wait until it serves.

        Raises:
            RuntimeError: The server did not start. The text holds the end of its log.
        """
        # Another process may take a free port between the search and its use.
        for _ in range(ATTEMPTS - 1 if len(self._ports) < self._wanted else 0):
            with contextlib.suppress(PortTaken):
                return self._start_once()
            self._ports = ()
        return self._start_once()

    def _start_once(self) -> Self:
        self.launch()
        return self.await_service()

    def launch(self) -> None:
        """Start the server without waiting, for servers that need each other to serve."""
        if self.alive():
            raise RuntimeError(f"the server runs already, pid {self.pid}")
        fresh = self._folder is None
        if fresh:
            self._folder = Path(tempfile.mkdtemp(prefix=f"celery-dq-{self.name}-"))
            atexit.register(self.stop)
        if len(self._ports) < self._wanted:
            self._ports = free_ports(self._wanted)
        try:
            with self._telling():
                self._child = self._run()
        except RuntimeError:
            raise  # keep the folder, because its log explains the error
        except BaseException:
            self.stop() if fresh else self._end(signal.SIGKILL)
            raise

    def await_service(self) -> Self:
        """Wait until the server serves, after :meth:`launch`."""
        with self._telling():
            wait_until(self._is_up, self.start_timeout_s, what=f"{self.name} to serve")
        return self

    def stop(self) -> None:
        """End the server by SIGTERM and remove its data. Idempotent."""
        if not self._owner.is_current:
            # A fork inherits the atexit call, but does not own the server.
            return
        self._end(signal.SIGTERM)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
            atexit.unregister(self.stop)

    def kill(self) -> None:
        """End the server by SIGKILL. Data that is not on disk is lost. :meth:`restart` starts it again."""
        self._running()
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Start the server again with the same ports and data, after ending it by SIGTERM if it runs."""
        self._end(signal.SIGTERM)
        self.start()

    def pause(self) -> None:
        """Stop its process (SIGSTOP). Connections stay open without answers."""
        self._running().send(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a paused process (SIGCONT)."""
        self._running().send(signal.SIGCONT)

    def __repr__(self) -> str:
        where = f" port {self._ports[0]}" if self._ports else ""
        return f"<{type(self).__name__}{where} {'running' if self.alive() else 'stopped'}>"

    # -- implementation

    def _running(self) -> ChildProcess:
        if self._child is None or not self._child.alive():
            raise RuntimeError("the server does not run")
        return self._child

    def _end(self, number: signal.Signals) -> None:
        if self._child is not None:
            self._child.end(number, self.stop_timeout_s)
            self._child = None

    def _is_up(self) -> bool:
        if not self.alive():
            raise ChildProcessError("the process ended")
        try:
            return self._serves()
        except OSError:
            return False

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """End the server when it does not start, and raise an error with its log."""
        try:
            yield
        except (ChildProcessError, TimeoutError) as error:
            output = self.log[-4000:]
            self._end(signal.SIGKILL)
            taken = [str(port) for port in self._ports if not is_free(port)]
            kind = PortTaken if taken else RuntimeError
            ports = f", port {', '.join(taken)} is in use" if taken else ""
            raise kind(f"{self.name} did not start: {error}{ports}\n{output}") from None
