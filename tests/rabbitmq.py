"""A local RabbitMQ server.

.. code-block:: python

    with RabbitMQServer() as server:
        app = Celery(broker=server.url())

A server listens on free ports of 127.0.0.1, keeps its data in a temporary folder, and is independent of
another RabbitMQ on the machine. It boots in five to ten seconds, and ends with the block or the process.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from celery_dq.testing.local_server import LocalServer
from celery_dq.testing.processes import ChildProcess
from celery_dq.testing.waiting import wait_until

__all__ = ["RabbitMQServer", "find_epmd", "find_rabbitmq_server"]

START_TIMEOUT_S = 120.0

#: Folders of the server's own script. Debian's script on the PATH switches to the user and folder of the
#: system.
PLACES = ("/usr/lib/rabbitmq/bin", "/opt/rabbitmq/sbin", "/opt/homebrew/sbin", "/usr/local/sbin")
HOW = "apt-get install --no-install-recommends rabbitmq-server, brew install rabbitmq"


def find_rabbitmq_server() -> str:
    """Return the path of the script that runs RabbitMQ.

    Raises:
        FileNotFoundError: RabbitMQ is not installed. The text says how to install it.
    """
    for place in PLACES:
        if found := shutil.which("rabbitmq-server", path=place):
            return found
    if found := shutil.which("rabbitmq-server"):
        return found
    raise FileNotFoundError(f"no RabbitMQ server found: put rabbitmq-server on the PATH ({HOW})")


def find_epmd() -> str:
    """Return the path of Erlang's port mapper, which RabbitMQ needs.

    Raises:
        FileNotFoundError: It is not installed. The text says how to install it.
    """
    if found := shutil.which("epmd"):
        return found
    for library in ("/usr/lib/erlang", "/usr/local/lib/erlang", "/opt/homebrew/lib/erlang"):
        for found in sorted(str(path) for path in Path(library).glob("erts-*/bin/epmd")):
            return found
    raise FileNotFoundError(f"no epmd found, which comes with Erlang: {HOW}")


class RabbitMQServer(LocalServer):
    """One RabbitMQ server. A context manager; or call :meth:`start` and :meth:`stop`.

    Its only user is ``guest`` with the password ``guest``, its only virtual host ``/``. Only durable queues
    survive :meth:`kill`.

    Args:
        config: Further lines of ``rabbitmq.conf`` by name, e.g. ``{"heartbeat": 5}``.
    """

    name = "rabbitmq"
    start_timeout_s = START_TIMEOUT_S
    stop_timeout_s = 15.0

    def __init__(self, *, config: Mapping[str, str | int] | None = None) -> None:
        # The ports of AMQP, of Erlang's distribution, and of the port mapper.
        super().__init__(3)
        self._config = dict(config or {})
        self._mapper: ChildProcess | None = None

    def url(self, *, scheme: str = "amqp") -> str:
        """Return its URL, e.g. ``amqp://guest:guest@127.0.0.1:49152//``."""
        return f"{scheme}://guest:guest@127.0.0.1:{self.port}//"

    def control(self, *arguments: str) -> str:
        """Run ``rabbitmqctl``, e.g. ``control("close_all_connections", "bye")``. It takes two seconds.

        Returns:
            The output of the command.

        Raises:
            RuntimeError: The command failed. The text holds its output.
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

    def stop(self) -> None:
        """End the server at once, because its data goes with it."""
        if self._owner.is_current:
            self._end(signal.SIGKILL)
        super().stop()

    # -- implementation

    def _end(self, number: signal.Signals) -> None:
        super()._end(number)
        if self._mapper is not None:
            self._mapper.end(signal.SIGKILL, self.stop_timeout_s)
            self._mapper = None

    def _run(self) -> ChildProcess:
        script, mapper = find_rabbitmq_server(), find_epmd()
        port, _, names = self.ports
        folder = self.folder
        settings = {
            "listeners.tcp.1": f"127.0.0.1:{port}",
            "log.console": "true",
            "log.file": "false",
            # With the defaults, a machine that is short of memory or disk would block all publishers.
            "vm_memory_high_watermark.relative": "0.9",
            "disk_free_limit.absolute": "1MB",
            **self._config,
        }
        (folder / "rabbitmq.conf").write_text("".join(f"{key} = {each}\n" for key, each in settings.items()))
        (folder / "enabled_plugins").write_text("[].\n")
        environment = self._environment() | {
            # Without -start_epmd false the port mapper would be a daemon that never ends. Two schedulers are
            # enough. By default a scheduler without work spins for a while, a quarter of the time of a boot.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "-start_epmd false -kernel inet_dist_use_interface {127,0,0,1} +S 2:2 +A 4"
                " +sbwt none +sbwtdcpu none +sbwtdio none"
            ),
            # With this setting the script executes the server, instead of waiting for it in a shell.
            "RABBITMQ_ALLOW_INPUT": "1",
            "RABBITMQ_SERVER_START_ARGS": "-noinput",
        }
        self._mapper = ChildProcess(
            [mapper, "-port", str(names)], log=folder / "epmd.log", folder=folder, environment=environment
        )
        wait_until(lambda: _answers(names), START_TIMEOUT_S, what="Erlang's port mapper")
        return ChildProcess([script], log=self.log_file, folder=folder, environment=environment)

    def _environment(self) -> dict[str, str]:
        """Return an environment that separates the server and ``rabbitmqctl`` from other servers."""
        port, distribution, names = self.ports
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
            # Erlang keeps its cookie in the home folder.
            "HOME": str(self.folder),
            "ERL_EPMD_PORT": str(names),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"celery-dq-{port}@localhost",
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_LOGS": "-",
        }

    def _serves(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), 2.0) as connection:
            connection.settimeout(2.0)
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            # The server answers with a method frame on channel 0.
            return connection.recv(3) == b"\x01\x00\x00"


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
