"""What the servers of this package share: starting, waiting for service, ending, and leaving nothing behind.

A server of another kind is a subclass that says how its process is run and when it serves:

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
import os
import shutil
import signal
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

from celery_dq.testing.processes import ChildProcess, free_port
from celery_dq.testing.waiting import wait_until

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LocalServer", "Startable", "free_ports"]

#: How often a start is tried with other free ports, when somebody else was faster.
ATTEMPTS = 5
#: What servers say of a port that is taken, in small letters.
TAKEN = ("in use", "eaddrinuse")


class PortTaken(RuntimeError):
    """A server did not start, because somebody else has its port."""


def free_ports(count: int) -> tuple[int, ...]:
    """So many different ports that nobody uses at this moment."""
    found: dict[int, None] = {}
    while len(found) < count:
        found[free_port()] = None
    return tuple(found)


class Startable(ABC):
    """What a ``with`` block starts and stops; or call :meth:`start` and :meth:`stop`."""

    @abstractmethod
    def start(self) -> Self:
        """Start it, wait until it serves, and return it."""

    @abstractmethod
    def stop(self) -> None:
        """End it and leave nothing behind. Does nothing when it is gone."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class LocalServer(Startable):
    """A server on ports of 127.0.0.1, with its data in a temporary folder.

    It is gone when the ``with`` block or the process ends, however that ends.

    :param ports: how many free ports it needs, which are chosen at its first start and stay the same over
        restarts; or the ports themselves. The first is for clients.
    """

    #: In the names of its folder and its log, and in what is said of it.
    name: ClassVar[str]
    #: Seconds until a start has failed.
    start_timeout_s: ClassVar[float] = 30.0
    #: Seconds for an end in good order.
    stop_timeout_s: ClassVar[float] = 5.0

    def __init__(self, ports: int | Sequence[int] = 1) -> None:
        self._wanted = ports if isinstance(ports, int) else len(ports)
        self._ports = () if isinstance(ports, int) else tuple(ports)
        self._child: ChildProcess | None = None
        self._folder: Path | None = None
        self._owner = os.getpid()

    # -- for subclasses

    @abstractmethod
    def _run(self) -> ChildProcess:
        """Start the process. Called with a folder and with ports."""

    @abstractmethod
    def _serves(self) -> bool:
        """Whether it serves. Called again and again while the process lives; OSError is a no."""

    # -- where it is

    @property
    def folder(self) -> Path:
        """The folder that holds its data and its log, from :meth:`start` to :meth:`stop`."""
        if self._folder is None:
            raise RuntimeError("the server was not started")
        return self._folder

    @property
    def ports(self) -> tuple[int, ...]:
        """Its ports on 127.0.0.1, from the first :meth:`start` on."""
        if len(self._ports) < max(self._wanted, 1):
            raise RuntimeError("the server has no port: it was not started, or listens on none")
        return self._ports

    @property
    def port(self) -> int:
        """Its port on 127.0.0.1 for clients, from the first :meth:`start` on."""
        return self.ports[0]

    @property
    def pid(self) -> int:
        """Its process id while it runs."""
        return self._running().pid

    @property
    def log_file(self) -> Path:
        """Where it says what it does."""
        return self.folder / f"{self.name}.log"

    @property
    def log(self) -> str:
        """What it has said so far."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def alive(self) -> bool:
        """Whether its process exists; True also while paused."""
        return self._child is not None and self._child.alive()

    # -- start and stop

    def start(self) -> Self:
        """Start it and wait until it serves. Raises RuntimeError with its log when it does not."""
        # Somebody may take a free port in the moment between finding and using it.
        for _ in range(ATTEMPTS - 1 if len(self._ports) < self._wanted else 0):
            with contextlib.suppress(PortTaken):
                return self._start_once()
            self._ports = ()
        return self._start_once()

    def _start_once(self) -> Self:
        self.launch()
        return self.await_service()

    def launch(self) -> None:
        """Start it without waiting: some servers need each other to serve."""
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
            raise  # its folder holds a log to read
        except BaseException:
            self.stop() if fresh else self._end(signal.SIGKILL)
            raise

    def await_service(self) -> Self:
        """Wait until it serves, after :meth:`launch`."""
        with self._telling():
            wait_until(self._is_up, self.start_timeout_s, what=f"{self.name} to serve")
        return self

    def stop(self) -> None:
        """End it in good order and remove its data. Does nothing when it is gone."""
        if os.getpid() != self._owner:
            # A fork inherits the atexit call, not the server.
            return
        self._end(signal.SIGTERM)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
            atexit.unregister(self.stop)

    def kill(self) -> None:
        """End it at once by SIGKILL; what was not on disk is lost. :meth:`restart` brings it back."""
        self._running()
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Start it again on the same ports and data, ending it by SIGTERM first if it runs."""
        self._end(signal.SIGTERM)
        self.start()

    def pause(self) -> None:
        """Stop its process (SIGSTOP): connections stay open and nobody answers."""
        self._running().send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused one go on (SIGCONT)."""
        self._running().send(signal.SIGCONT)

    def __repr__(self) -> str:
        where = f" port {self._ports[0]}" if self._ports else ""
        return f"<{type(self).__name__}{where} {'running' if self.alive() else 'stopped'}>"

    # -- inside

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
        """End it when it does not come up, and say what it said."""
        try:
            yield
        except (ChildProcessError, TimeoutError) as error:
            said = self.log
            self._end(signal.SIGKILL)
            taken = any(each in said.lower() for each in TAKEN)
            kind = PortTaken if taken else RuntimeError
            raise kind(f"{self.name} did not start: {error}\n{said[-4000:]}") from None
