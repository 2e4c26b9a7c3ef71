"""Redis servers of one's own: for tests, for examples, for trying things out.

.. code-block:: python

    with RedisServer() as server:
        app = Celery(broker=server.url(scheme="dq-redis"))

A server listens on a free port of 127.0.0.1, keeps its data in a temporary folder, and is gone when
the block or the process ends.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from celery_dq.testing.processes import ChildProcess, find_redis_server, free_port
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.wire import Address, Reply, ServerSaid, ask

__all__ = ["RedisServer", "SentinelPair", "wait_until"]

START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0


class RedisServer:
    """One Redis server. A context manager; or call :meth:`start` and :meth:`stop`.

    :param appendonly: True writes every change to disk (``appendfsync always``), so that
        :meth:`restart` after :meth:`kill` finds it again; default False.
    :param config: further settings by name, e.g. ``{"maxmemory-policy": "allkeys-lru"}``.
    :param unix_socket: True listens on a socket in the data folder and on no port; default False.
    :param port: a port of 127.0.0.1; default a free one, which stays the same over restarts.
    :param binary: the server to run; default the one that
        :func:`~celery_dq.testing.processes.find_redis_server` finds.
    """

    def __init__(
        self,
        *,
        appendonly: bool = False,
        config: Mapping[str, str | int] | None = None,
        unix_socket: bool = False,
        port: int | None = None,
        binary: str | None = None,
    ) -> None:
        self._appendonly = appendonly
        self._config = dict(config or {})
        self._unix_socket = unix_socket
        self._wanted_port = port
        self._port = port
        self._binary = binary
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
        """Its port on 127.0.0.1, from the first :meth:`start` on."""
        if self._port is None:
            raise RuntimeError("the server has no port: it was not started, or listens on a unix socket")
        return self._port

    @property
    def socket_path(self) -> str:
        """Its unix socket."""
        if not self._unix_socket:
            raise RuntimeError(f"the server listens on port {self._port}: give unix_socket=True")
        return str(self.folder / "redis.sock")

    @property
    def address(self) -> Address:
        """(host, port), or the path of the unix socket."""
        return self.socket_path if self._unix_socket else ("127.0.0.1", self.port)

    def url(self, db: int = 0, *, scheme: str = "redis") -> str:
        """Its URL, e.g. ``redis://127.0.0.1:49152/0``.

        For a unix socket it is one that redis-py reads, or with another scheme one that kombu reads.
        """
        if self._unix_socket and scheme != "redis":
            return f"{scheme}+socket://{self.socket_path}?virtual_host={db}"
        if self._unix_socket:
            return f"unix://{self.socket_path}?db={db}"
        return f"{scheme}://127.0.0.1:{self.port}/{db}"

    @property
    def pid(self) -> int:
        """Its process id while it runs."""
        return self._running().pid

    @property
    def log(self) -> str:
        """What it has said so far."""
        path = self.folder / "redis.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def alive(self) -> bool:
        """Whether its process exists; True also while paused."""
        return self._child is not None and self._child.alive()

    def ask(self, *command: str | float, timeout_s: float = 2.0) -> Reply:
        """Send one command on a connection of its own, e.g. ``server.ask("DBSIZE")``."""
        return ask(self.address, *command, timeout_s=timeout_s)

    def flush(self, db: int = 0) -> None:
        """Empty database `db`, and leave the others alone."""
        # One connection a command, so the database is chosen by a script.
        self.ask("EVAL", "redis.call('SELECT', ARGV[1]) return redis.call('FLUSHDB')", 0, db)

    # -- start and stop

    def start(self) -> RedisServer:
        """Start it and wait until it answers. Raises RuntimeError with its log when it does not."""
        if self.alive():
            raise RuntimeError(f"the server runs already, pid {self.pid}")
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="celery-dq-redis-"))
            atexit.register(self.stop)
        binary = self._binary or find_redis_server()
        # Somebody may take the free port in the moment between finding and using it.
        attempts = 1 if self._port is not None or self._unix_socket else 5
        for attempt in range(1, attempts + 1):
            if not self._unix_socket and self._wanted_port is None and (self._port is None or attempt > 1):
                self._port = free_port()
            self._child = ChildProcess(
                self._command(binary), log=self.folder / "redis.log", folder=self.folder
            )
            try:
                wait_until(self._answers, START_TIMEOUT_S, what="an answer to PING")
            except (ChildProcessError, TimeoutError) as error:
                log = self.log
                self._end(signal.SIGKILL)
                if attempt < attempts and "in use" in log:
                    continue
                if attempts > 1:
                    self._port = self._wanted_port
                raise RuntimeError(f"{binary} did not start: {error}\n{log[-4000:]}") from None
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
        """End it at once by SIGKILL; what was not on disk is lost. :meth:`restart` brings it back."""
        self._running()
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Start it again on the same port and data, ending it by SIGTERM first if it runs."""
        self._end(signal.SIGTERM)
        self.start()

    def become_replica(self, port: int) -> None:
        """Start it again as the replica of the server on `port` of 127.0.0.1, ending it first if it runs."""
        self._config["replicaof"] = f"127.0.0.1 {port}"
        self.restart()

    def pause(self) -> None:
        """Stop its process (SIGSTOP): connections stay open and nobody answers."""
        self._running().send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused one go on (SIGCONT)."""
        self._running().send(signal.SIGCONT)

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        where = "unix socket" if self._unix_socket else f"port {self._port}"
        return f"<RedisServer {where} {'running' if self.alive() else 'stopped'}>"

    # -- inside

    def _running(self) -> ChildProcess:
        if self._child is None or not self._child.alive():
            raise RuntimeError("the server does not run")
        return self._child

    def _end(self, number: signal.Signals) -> None:
        if self._child is not None:
            self._child.end(number, STOP_TIMEOUT_S)
            self._child = None

    def _command(self, binary: str) -> list[str]:
        settings: dict[str, str | int] = {
            "bind": "127.0.0.1",
            "port": 0 if self._unix_socket else self.port,
            "dir": str(self.folder),
            "save": "",
            "appendonly": "yes" if self._appendonly else "no",
            "appendfsync": "always",
            "daemonize": "no",
        }
        if self._unix_socket:
            settings["unixsocket"] = self.socket_path
        settings.update(self._config)
        command = [binary]
        for name, value in settings.items():
            command += [f"--{name}", *(str(value).split() or [""])]
        return command

    def _answers(self) -> bool:
        """Whether it serves. A server that wants a password does; one that still loads does not."""
        if not self.alive():
            raise ChildProcessError("the process ended")
        try:
            return self.ask("PING", timeout_s=1.0) == "PONG"
        except ServerSaid as said:
            return str(said).startswith(("NOAUTH", "MASTERDOWN"))
        except OSError:
            return False


class SentinelPair:
    """A master, its replica, and one sentinel that promotes the replica when the master is gone.

    :param name: what the sentinel calls the master; default ``mymaster``.
    :param down_after_ms: silence in milliseconds after which the master counts as down; default 500.
    """

    def __init__(self, *, name: str = "mymaster", down_after_ms: int = 500) -> None:
        self.name = name
        self._down_after_ms = down_after_ms
        # The two as they started; after a fail-over the roles are swapped.
        self.master = RedisServer(config={"repl-diskless-sync-delay": 0})
        self.replica: RedisServer | None = None
        self._sentinel: ChildProcess | None = None
        self._sentinel_port: int | None = None

    @property
    def sentinel_port(self) -> int:
        """The port of the sentinel on 127.0.0.1."""
        if self._sentinel_port is None:
            raise RuntimeError("the sentinel was not started")
        return self._sentinel_port

    def start(self) -> SentinelPair:
        """Start the three and wait until the replica is in step and the sentinel knows it."""
        try:
            self.master.start()
            self.replica = RedisServer(
                config={"replicaof": f"127.0.0.1 {self.master.port}", "repl-diskless-sync-delay": 0}
            ).start()
            self._await_step(START_TIMEOUT_S)
            self._start_sentinel()
            atexit.register(self.stop)
        except BaseException:
            self.stop()
            raise
        return self

    def master_port(self) -> int:
        """The port of the server that the sentinel calls master at this moment."""
        reply = ask(("127.0.0.1", self.sentinel_port), "SENTINEL", "get-master-addr-by-name", self.name)
        if not isinstance(reply, list) or len(reply) != 2:
            raise RuntimeError(f"the sentinel knows no master {self.name!r}: {reply!r}")
        return int(str(reply[1]))

    def fail_over(self, timeout_s: float = 30.0) -> None:
        """Kill the master and wait until the replica has taken its place."""
        self.master.kill()
        self.await_promotion(timeout_s)

    def rejoin(self, timeout_s: float = 30.0) -> None:
        """After a fail-over: start the killed one again as a replica, and wait until it is in step.

        :attr:`master` and :attr:`replica` have changed their places then, and there may be another fail-over.
        """
        former, promoted = self.master, self.replica
        if promoted is None:
            raise RuntimeError("the pair was not started")
        former.become_replica(promoted.port)
        self.master, self.replica = promoted, former
        self._await_step(timeout_s)

    def await_promotion(self, timeout_s: float = 30.0) -> None:
        """Wait until the former replica is a master and the sentinel says so."""
        replica = self.replica
        if replica is None:
            raise RuntimeError("the pair was not started")
        wait_until(
            lambda: (
                self.master_port() == replica.port
                and "role:master" in str(replica.ask("INFO", "replication"))
            ),
            timeout_s,
            what="the promotion of the replica",
        )

    def url(self, db: int = 0, *, scheme: str = "sentinel") -> str:
        """The URL of the sentinel; the name of the master goes into the transport options."""
        return f"{scheme}://127.0.0.1:{self.sentinel_port}/{db}"

    def stop(self) -> None:
        """End all three. Does nothing when they are gone."""
        if self._sentinel is not None:
            self._sentinel.end(signal.SIGTERM, STOP_TIMEOUT_S)
            self._sentinel = None
        if self.replica is not None:
            self.replica.stop()
        self.master.stop()
        atexit.unregister(self.stop)

    def __enter__(self) -> SentinelPair:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _await_step(self, timeout_s: float) -> None:
        def in_step() -> bool:
            return self.replica is not None and "master_link_status:up" in str(
                self.replica.ask("INFO", "replication")
            )

        wait_until(in_step, timeout_s, what="the replica in step with its master")

    def _start_sentinel(self) -> None:
        # A sentinel rewrites its own configuration, so it needs a file of its own.
        folder = self.master.folder
        self._sentinel_port = free_port()
        configuration = folder / "sentinel.conf"
        configuration.write_text(
            f"port {self._sentinel_port}\n"
            "bind 127.0.0.1\n"
            f"dir {folder}\n"
            f"sentinel monitor {self.name} 127.0.0.1 {self.master.port} 1\n"
            f"sentinel down-after-milliseconds {self.name} {self._down_after_ms}\n"
            f"sentinel failover-timeout {self.name} 5000\n"
        )
        self._sentinel = ChildProcess(
            [find_redis_server(), str(configuration), "--sentinel"],
            log=folder / "sentinel.log",
            folder=folder,
        )
        wait_until(self._sentinel_ready, START_TIMEOUT_S, what="the sentinel to know the replica")

    def _sentinel_ready(self) -> bool:
        try:
            replicas = ask(("127.0.0.1", self.sentinel_port), "SENTINEL", "replicas", self.name)
        except (OSError, ServerSaid):
            return False
        return isinstance(replicas, list) and any("master-link-status" in str(row) for row in replicas)
