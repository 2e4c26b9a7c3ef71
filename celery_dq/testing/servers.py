"""Redis servers of one's own: for tests, for examples, for trying things out.

.. code-block:: python

    with RedisServer() as server:
        app = Celery(broker=server.url(scheme="dq-redis"))

A server listens on a free port of 127.0.0.1, keeps its data in a temporary folder, and is gone when
the block or the process ends.
"""

from __future__ import annotations

from collections.abc import Mapping

from celery_dq.testing.local_server import LocalServer, Startable
from celery_dq.testing.processes import ChildProcess, find_redis_server
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.wire import Address, Reply, ServerSaid, ask

__all__ = ["RedisServer", "SentinelPair", "wait_until"]

START_TIMEOUT_S = 30.0
#: Milliseconds of silence after which a master that was killed counts as down.
HASTE_MS = 500
#: Seconds until a fail-over has failed. A sentinel that was itself held up for two seconds does nothing for
#: thirty.
FAIL_OVER_S = 90.0


class RedisServer(LocalServer):
    """One Redis server. A context manager; or call :meth:`start` and :meth:`stop`.

    :param appendonly: True writes every change to disk (``appendfsync always``), so that
        :meth:`restart` after :meth:`kill` finds it again; default False.
    :param config: further settings by name, e.g. ``{"maxmemory-policy": "allkeys-lru"}``.
    :param unix_socket: True listens on a socket in the data folder and on no port; default False.
    :param port: a port of 127.0.0.1; default a free one, which stays the same over restarts.
    :param binary: the server to run; default the one that
        :func:`~celery_dq.testing.processes.find_redis_server` finds.
    """

    name = "redis"
    start_timeout_s = START_TIMEOUT_S

    def __init__(
        self,
        *,
        appendonly: bool = False,
        config: Mapping[str, str | int] | None = None,
        unix_socket: bool = False,
        port: int | None = None,
        binary: str | None = None,
    ) -> None:
        super().__init__(0 if unix_socket else 1 if port is None else [port])
        self._appendonly = appendonly
        self._config = dict(config or {})
        self._unix_socket = unix_socket
        self._binary = binary

    # -- where it is

    @property
    def socket_path(self) -> str:
        """Its unix socket."""
        if not self._unix_socket:
            raise RuntimeError(f"the server listens on {self._ports or 'a port'}: give unix_socket=True")
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

    def ask(self, *command: str | float, timeout_s: float = 20.0) -> Reply:
        """Send one command on a connection of its own, e.g. ``server.ask("DBSIZE")``."""
        return ask(self.address, *command, timeout_s=timeout_s)

    def flush(self, db: int = 0) -> None:
        """Empty database `db`, and leave the others alone."""
        # One connection a command, so the database is chosen by a script.
        self.ask("EVAL", "redis.call('SELECT', ARGV[1]) return redis.call('FLUSHDB')", 0, db)

    def become_replica(self, port: int) -> None:
        """Start it again as the replica of the server on `port` of 127.0.0.1, ending it first if it runs."""
        self._config["replicaof"] = f"127.0.0.1 {port}"
        self.restart()

    # -- inside

    def _run(self) -> ChildProcess:
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
        command = [self._binary or find_redis_server()]
        for name, value in settings.items():
            command += [f"--{name}", *(str(value).split() or [""])]
        return ChildProcess(command, log=self.log_file, folder=self.folder)

    def _serves(self) -> bool:
        """A server that wants a password does; one that still loads does not."""
        try:
            return self.ask("PING", timeout_s=1.0) == "PONG"
        except ServerSaid as said:
            return str(said).startswith(("NOAUTH", "MASTERDOWN"))


class Sentinel(LocalServer):
    """A sentinel of Redis that watches one master.

    :param master: what it watches; it must run when this one starts.
    :param master_name: what it calls the master.
    :param down_after_ms: silence in milliseconds after which the master counts as down.
    """

    name = "sentinel"
    start_timeout_s = START_TIMEOUT_S

    def __init__(self, master: RedisServer, master_name: str, down_after_ms: int) -> None:
        super().__init__()
        self._master = master
        self._master_name = master_name
        self._down_after_ms = down_after_ms

    def ask(self, *command: str) -> Reply:
        """Send ``SENTINEL`` with these words, followed by the name of the master."""
        return ask(("127.0.0.1", self.port), "SENTINEL", *command, self._master_name)

    def count_as_down_after(self, milliseconds: int) -> None:
        """From now on a master that is silent for so long counts as down."""
        setting = ("down-after-milliseconds", milliseconds)
        ask(("127.0.0.1", self.port), "SENTINEL", "SET", self._master_name, *setting)

    def counts_on_a_replica(self) -> bool:
        """Whether it holds a replica to be alive."""
        replicas = self.ask("replicas")
        rows = [row for row in replicas if isinstance(row, list)] if isinstance(replicas, list) else []
        # One that is taken for dead has more flags.
        return any(
            dict(zip(map(str, row[::2]), row[1::2], strict=True)).get("flags") == "slave" for row in rows
        )

    def _run(self) -> ChildProcess:
        # It rewrites its own configuration, so it needs a file of its own.
        configuration = self.folder / "sentinel.conf"
        name = self._master_name
        configuration.write_text(
            f"port {self.port}\n"
            "bind 127.0.0.1\n"
            f"dir {self.folder}\n"
            f"sentinel monitor {name} 127.0.0.1 {self._master.port} 1\n"
            f"sentinel down-after-milliseconds {name} {self._down_after_ms}\n"
            f"sentinel failover-timeout {name} 5000\n"
        )
        command = [find_redis_server(), str(configuration), "--sentinel"]
        return ChildProcess(command, log=self.log_file, folder=self.folder)

    def _serves(self) -> bool:
        """Whether it knows the replica."""
        try:
            replicas = self.ask("replicas")
        except ServerSaid:
            return False
        return isinstance(replicas, list) and any("master-link-status" in str(row) for row in replicas)


class SentinelPair(Startable):
    """A master, its replica, and one sentinel that promotes the replica when the master is gone.

    :param name: what the sentinel calls the master; default ``mymaster``.
    :param down_after_ms: silence in milliseconds after which the master counts as down; default 5,000. Less,
        and a busy machine loses a master that is well. :meth:`fail_over` does not wait for so long.
    """

    def __init__(self, *, name: str = "mymaster", down_after_ms: int = 5000) -> None:
        self.name = name
        # The two as they started; after a fail-over the roles are swapped.
        self.master = RedisServer(config={"repl-diskless-sync-delay": 0})
        self.replica: RedisServer | None = None
        self._down_after_ms = down_after_ms
        self._sentinel = Sentinel(self.master, name, down_after_ms)

    @property
    def sentinel_port(self) -> int:
        """The port of the sentinel on 127.0.0.1."""
        return self._sentinel.port

    def start(self) -> SentinelPair:
        """Start the three and wait until the replica is in step and the sentinel knows it."""
        try:
            self.master.start()
            self.replica = RedisServer(
                config={"replicaof": f"127.0.0.1 {self.master.port}", "repl-diskless-sync-delay": 0}
            ).start()
            self._await_step(START_TIMEOUT_S)
            self._sentinel.start()
        except BaseException:
            self.stop()
            raise
        return self

    def master_port(self) -> int:
        """The port of the server that the sentinel calls master at this moment."""
        reply = self._sentinel.ask("get-master-addr-by-name")
        if not isinstance(reply, list) or len(reply) != 2:
            raise RuntimeError(f"the sentinel knows no master {self.name!r}: {reply!r}")
        return int(str(reply[1]))

    def fail_over(self, timeout_s: float = FAIL_OVER_S) -> None:
        """Kill the master and wait until the replica has taken its place."""
        self.master.kill()
        self._sentinel.count_as_down_after(HASTE_MS)
        try:
            self.await_promotion(timeout_s)
        finally:
            self._sentinel.count_as_down_after(self._down_after_ms)

    def rejoin(self, timeout_s: float = FAIL_OVER_S) -> None:
        """After a fail-over: start the killed one again as a replica, and wait until it is in step.

        :attr:`master` and :attr:`replica` have changed their places then, and there may be another fail-over.
        """
        former, promoted = self.master, self.replica
        if promoted is None:
            raise RuntimeError("the pair was not started")
        former.become_replica(promoted.port)
        self.master, self.replica = promoted, former
        self._await_step(timeout_s)
        # Else it would have nobody to promote, and try again after ten seconds.
        wait_until(self._sentinel.counts_on_a_replica, timeout_s, what="the sentinel to see the replica")

    def await_promotion(self, timeout_s: float = FAIL_OVER_S) -> None:
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
        self._sentinel.stop()
        if self.replica is not None:
            self.replica.stop()
        self.master.stop()

    def _await_step(self, timeout_s: float) -> None:
        def in_step() -> bool:
            return self.replica is not None and "master_link_status:up" in str(
                self.replica.ask("INFO", "replication")
            )

        wait_until(in_step, timeout_s, what="the replica in step with its master")
