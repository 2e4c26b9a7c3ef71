"""A RabbitMQ server of one's own.

.. code-block:: python

    with RabbitMQServer() as server:
        app = Celery(broker=server.url())

A server listens on free ports of 127.0.0.1, keeps its data in a temporary folder, knows nothing of another
RabbitMQ on the machine, boots in five to ten seconds, and is gone when the block or the process ends.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from celery_dq.testing.processes import ChildProcess, free_port
from celery_dq.testing.waiting import wait_until

__all__ = ["RabbitMQServer", "find_epmd", "find_rabbitmq_server"]

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0

#: The server's own script. What Debian has on the PATH changes to a user and a folder of the system's server.
PLACES = ("/usr/lib/rabbitmq/bin", "/opt/rabbitmq/sbin", "/opt/homebrew/sbin", "/usr/local/sbin")
HOW = "apt-get install --no-install-recommends rabbitmq-server, brew install rabbitmq"


def find_rabbitmq_server() -> str:
    """Path of the script that runs RabbitMQ.

    Raises :exc:`FileNotFoundError` that says how to get one.
    """
    for place in PLACES:
        if found := shutil.which("rabbitmq-server", path=place):
            return found
    if found := shutil.which("rabbitmq-server"):
        return found
    raise FileNotFoundError(f"no RabbitMQ server found: put rabbitmq-server on the PATH ({HOW})")


def find_epmd() -> str:
    """Path of Erlang's port mapper, without which RabbitMQ does not start.

    Raises :exc:`FileNotFoundError` that says how to get one.
    """
    if found := shutil.which("epmd"):
        return found
    for library in ("/usr/lib/erlang", "/usr/local/lib/erlang", "/opt/homebrew/lib/erlang"):
        for found in sorted(str(path) for path in Path(library).glob("erts-*/bin/epmd")):
            return found
    raise FileNotFoundError(f"no epmd found, which comes with Erlang: {HOW}")


class RabbitMQServer:
    """One RabbitMQ server. A context manager; or call :meth:`start` and :meth:`stop`.

    Its only user is ``guest`` with the password ``guest``, its only virtual host ``/``.

    :param config: further lines of ``rabbitmq.conf`` by name, e.g. ``{"heartbeat": 5}``.
    """

    def __init__(self, *, config: dict[str, str | int] | None = None) -> None:
        self._config = dict(config or {})
        # AMQP, Erlang's distribution, the port mapper; they stay the same over restarts.
        self._ports: tuple[int, int, int] | None = None
        self._mapper: ChildProcess | None = None
        self._child: ChildProcess | None = None
        self._folder: Path | None = None
        self._owner = os.getpid()

    # -- where it is

    @property
    def folder(self) -> Path:
        """The folder that holds its data and its log, from :meth:`start` to :meth:`stop`."""
        if self._folder is None:
            raise RuntimeError("the server was not started")
        return self._folder

    @property
    def port(self) -> int:
        """Its AMQP port on 127.0.0.1, from the first :meth:`start` on."""
        if self._ports is None:
            raise RuntimeError("the server has no port: it was not started")
        return self._ports[0]

    def url(self, *, scheme: str = "amqp") -> str:
        """Its URL, e.g. ``amqp://guest:guest@127.0.0.1:49152//``."""
        return f"{scheme}://guest:guest@127.0.0.1:{self.port}//"

    @property
    def pid(self) -> int:
        """Its process id while it runs."""
        return self._running().pid

    @property
    def log(self) -> str:
        """What it has said so far."""
        path = self.folder / "rabbitmq.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def alive(self) -> bool:
        """Whether its process exists; True also while paused."""
        return self._child is not None and self._child.alive()

    def control(self, *arguments: str) -> str:
        """Run ``rabbitmqctl``, e.g. ``control("close_all_connections", "bye")``; return what it prints.

        Takes two seconds. Raises RuntimeError with what it says when it fails.
        """
        script = Path(find_rabbitmq_server()).with_name("rabbitmqctl")
        done = subprocess.run(
            [str(script), "--quiet", *arguments],
            env=self._environment(),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
        )
        if done.returncode:
            raise RuntimeError(f"rabbitmqctl {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    # -- start and stop

    def start(self) -> RabbitMQServer:
        """Start it and wait until it greets. Raises RuntimeError with its log when it does not."""
        if self.alive():
            raise RuntimeError(f"the server runs already, pid {self.pid}")
        script, mapper = find_rabbitmq_server(), find_epmd()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="celery-dq-rabbitmq-"))
            atexit.register(self.stop)
        # Somebody may take a free port in the moment between finding and using it.
        attempts = 1 if self._ports is not None else 3
        for attempt in range(1, attempts + 1):
            if self._ports is None or attempt > 1:
                self._ports = (free_port(), free_port(), free_port())
            try:
                self._launch(script, mapper)
                wait_until(self._greets, START_TIMEOUT_S, what="RabbitMQ's greeting")
            except (ChildProcessError, TimeoutError) as error:
                log = self.log
                self._end(signal.SIGKILL)
                if attempt < attempts and ("eaddrinuse" in log or "in use" in log):
                    continue
                raise RuntimeError(f"{script} did not start: {error}\n{log[-4000:]}") from None
            break
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
        """End it at once by SIGKILL; :meth:`restart` brings it back with its durable queues."""
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

    def __enter__(self) -> RabbitMQServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        where = "" if self._ports is None else f" port {self.port}"
        return f"<RabbitMQServer{where} {'running' if self.alive() else 'stopped'}>"

    # -- inside

    def _running(self) -> ChildProcess:
        if self._child is None or not self._child.alive():
            raise RuntimeError("the server does not run")
        return self._child

    def _end(self, number: signal.Signals) -> None:
        if self._child is not None:
            self._child.end(number, STOP_TIMEOUT_S)
            self._child = None
        if self._mapper is not None:
            self._mapper.end(signal.SIGKILL, STOP_TIMEOUT_S)
            self._mapper = None

    def _launch(self, script: str, mapper: str) -> None:
        assert self._ports is not None
        port, _, names = self._ports
        folder = self.folder
        settings = {
            "listeners.tcp.1": f"127.0.0.1:{port}",
            "log.console": "true",
            "log.file": "false",
            # A machine that is short of memory or disk would stop all publishers.
            "vm_memory_high_watermark.relative": "0.9",
            "disk_free_limit.absolute": "1MB",
            **self._config,
        }
        (folder / "rabbitmq.conf").write_text("".join(f"{key} = {each}\n" for key, each in settings.items()))
        (folder / "enabled_plugins").write_text("[].\n")
        environment = self._environment() | {
            # The port mapper would else be started as a daemon that nobody ends. Two schedulers are enough.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "-start_epmd false -kernel inet_dist_use_interface {127,0,0,1} +S 2:2 +A 4"
            ),
            # The script becomes the server then, instead of a shell that waits for it.
            "RABBITMQ_ALLOW_INPUT": "1",
            "RABBITMQ_SERVER_START_ARGS": "-noinput",
        }
        self._mapper = ChildProcess(
            [mapper, "-port", str(names)], log=folder / "epmd.log", folder=folder, environment=environment
        )
        wait_until(lambda: _answers(names), START_TIMEOUT_S, what="Erlang's port mapper")
        self._child = ChildProcess(
            [script], log=folder / "rabbitmq.log", folder=folder, environment=environment
        )

    def _environment(self) -> dict[str, str]:
        """What keeps the server, and who controls it, away from any other one."""
        assert self._ports is not None
        port, distribution, names = self._ports
        environment = {name: each for name, each in os.environ.items() if not name.startswith("RABBITMQ_")}
        files = {
            "CONF_ENV_FILE": "no-environment.conf",
            "CONFIG_FILE": "rabbitmq.conf",
            "CONFIG_FILES": "conf.d",
            "ADVANCED_CONFIG_FILE": "advanced.config",
            "ENABLED_PLUGINS_FILE": "enabled_plugins",
            "FEATURE_FLAGS_FILE": "feature_flags",
            "GENERATED_CONFIG_DIR": "generated",
            "MNESIA_BASE": "data",
            "PLUGINS_EXPAND_DIR": "plugins",
            "LOG_BASE": "",
        }
        return {
            **environment,
            **{f"RABBITMQ_{name}": str(self.folder / file) for name, file in files.items()},
            # Erlang's cookie is there.
            "HOME": str(self.folder),
            "ERL_EPMD_PORT": str(names),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"celery-dq-{port}@localhost",
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_LOGS": "-",
        }

    def _greets(self) -> bool:
        if not self.alive():
            raise ChildProcessError("the process ended")
        try:
            with socket.create_connection(("127.0.0.1", self.port), 2.0) as connection:
                connection.settimeout(2.0)
                connection.sendall(b"AMQP\x00\x00\x09\x01")
                # A method frame on channel 0.
                return connection.recv(3) == b"\x01\x00\x00"
        except OSError:
            return False


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
