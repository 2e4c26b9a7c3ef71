"""Local Redis servers, for tests, examples and experiments.

.. code-block:: python

    with RedisServer(has_password=True) as server:
        app = Celery(broker=server.url(scheme="dq-redis"))

A server listens on a free port of 127.0.0.1, keeps its data in a temporary folder, and ends with the block or
the process.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from typing import BinaryIO

from celery_dq.testing.local_server import LocalServer, ServerGroup
from celery_dq.testing.processes import ChildProcess, find_redis_server
from celery_dq.testing.waiting import wait_until

__all__ = ["Address", "ErrorReply", "RedisServer", "Reply", "SentinelPair", "ask", "wait_until"]

# (host, port), or the path of a unix socket.
Address = tuple[str, int] | str
Reply = str | int | None | list["Reply"]
#: Milliseconds of silence after which a master counts as down during :meth:`SentinelPair.fail_over`.
HASTE_MS = 500
#: Timeout of a fail-over in seconds. It is long, because a sentinel that was delayed by two seconds pauses
#: for thirty.
FAIL_OVER_S = 90.0


class ErrorReply(Exception):
    """An error reply of the server, such as ``LOADING`` or ``NOAUTH``."""


def ask(address: Address, *command: str | float, password: str = "", timeout_s: float = 20.0) -> Reply:
    """Send a command without a client library, on a new connection, and return the reply with decoded texts.

    Args:
        address: Address of the server.
        command: Words of the command.
        password: Password of the server; "" for a server without one.
        timeout_s: Seconds to wait for the connection and for each part of the reply.

    Raises:
        ErrorReply: The server sent an error reply.
        OSError: The server did not answer in time.
    """
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(address)
        with connection.makefile("rb") as stream:
            if password:
                _send(connection, "AUTH", password)
                _read(stream)
            _send(connection, *command)
            return _read(stream)


def _send(connection: socket.socket, *command: str | float) -> None:
    parts = [str(part).encode() for part in command]
    sent = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
    connection.sendall(b"*%d\r\n" % len(parts) + sent)


def _read(stream: BinaryIO) -> Reply:
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionError("the server closed the connection before it replied")
    kind, rest = line[:1], line[1:-2]
    if kind == b"+":
        return rest.decode()
    if kind == b"-":
        raise ErrorReply(rest.decode())
    if kind == b":":
        return int(rest)
    if kind == b"$":
        length = int(rest)
        return None if length < 0 else stream.read(length + 2)[:-2].decode(errors="surrogateescape")
    if kind == b"*":
        return None if int(rest) < 0 else [_read(stream) for _ in range(int(rest))]
    raise ConnectionError(f"the answer is not a Redis reply: {line!r}")


class RedisServer(LocalServer):
    """One Redis server. A context manager; or call :meth:`start` and :meth:`stop`.

    Args:
        appendonly: Whether each change is written to disk (``appendfsync always``), so that it survives
            :meth:`kill`.
        config: Further settings by name, e.g. ``{"maxmemory-policy": "allkeys-lru"}``.
        unix_socket: Whether to listen on a socket in the data folder instead of a port.
        has_password: Whether the server asks for a password, which is part of :meth:`url`. Without one, every
            user of the machine can reach the port.
        port: A port of 127.0.0.1; default a free one, which stays the same over restarts.
        binary: Path of the server; default from :func:`~celery_dq.testing.processes.find_redis_server`.
    """

    name = "redis"

    def __init__(
        self,
        *,
        appendonly: bool = False,
        config: Mapping[str, str | int] | None = None,
        unix_socket: bool = False,
        has_password: bool = False,
        port: int | None = None,
        binary: str | None = None,
    ) -> None:
        super().__init__(0 if unix_socket else 1 if port is None else [port])
        self._appendonly = appendonly
        self._config = dict(config or {})
        self._unix_socket = unix_socket
        self._password = secrets.token_hex(16) if has_password else ""
        self._binary = binary

    # -- addresses and commands

    @property
    def socket_path(self) -> str:
        """Path of its unix socket."""
        if not self._unix_socket:
            raise RuntimeError("the server has no unix socket: give unix_socket=True")
        return str(self.folder / "redis.sock")

    @property
    def address(self) -> Address:
        """(host, port), or the path of the unix socket."""
        return self.socket_path if self._unix_socket else ("127.0.0.1", self.port)

    def url(self, db: int = 0, *, scheme: str = "redis") -> str:
        """Return its URL, e.g. ``redis://127.0.0.1:49152/0``.

        For a unix socket the URL has the form of redis-py; with another scheme than ``redis`` it has that of
        kombu.
        """
        if self._unix_socket and scheme != "redis":
            return f"{scheme}+socket://{self.socket_path}?virtual_host={db}"
        if self._unix_socket:
            return f"unix://{self.socket_path}?db={db}"
        password = f":{self._password}@" * bool(self._password)
        return f"{scheme}://{password}127.0.0.1:{self.port}/{db}"

    def ask(self, *command: str | float, timeout_s: float = 20.0) -> Reply:
        """Send one command on a new connection, e.g. ``server.ask("DBSIZE")``, and return the reply."""
        return ask(self.address, *command, password=self._password, timeout_s=timeout_s)

    def flush(self, db: int = 0) -> None:
        """Delete all keys of database `db` only."""
        # Each command has its own connection, so a script selects the database.
        self.ask("EVAL", "redis.call('SELECT', ARGV[1]) return redis.call('FLUSHDB')", 0, db)

    def is_master(self) -> bool:
        """Return whether the server is a master, as it sees itself."""
        return "role:master" in str(self.ask("INFO", "replication"))

    def is_in_step(self) -> bool:
        """Return whether the server is a replica whose link to its master is up."""
        return "master_link_status:up" in str(self.ask("INFO", "replication"))

    def become_replica(self, port: int) -> None:
        """Start the server, or start it again, as a replica of the server on `port` of 127.0.0.1."""
        self._config["replicaof"] = f"127.0.0.1 {port}"
        self.restart()

    # -- implementation

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
        if self._password:
            # In a file in the folder of this user, because all users can see the words of a command.
            configuration = self.folder / "password.conf"
            configuration.write_text(f"requirepass {self._password}\n")
            command.append(str(configuration))
        for name, value in settings.items():
            command += [f"--{name}", *(str(value).split() or [""])]
        return ChildProcess(command, log=self.log_file, folder=self.folder)

    def _serves(self) -> bool:
        """Return whether the server answers, if only to ask for a password. One that loads data does not."""
        try:
            if self.ask("PING", timeout_s=1.0) != "PONG":
                return False
            # Another server may have the port. This one has not noticed yet that it cannot listen there.
            return f"process_id:{self.pid}\r\n" in str(self.ask("INFO", "server", timeout_s=1.0))
        except ErrorReply as output:
            return str(output).startswith(("NOAUTH", "MASTERDOWN"))


class Sentinel(LocalServer):
    """A sentinel of Redis that watches one master.

    Args:
        master: The master, which must run when the sentinel starts.
        master_name: Name of the master in the sentinel.
        down_after_ms: Silence in milliseconds after which the master counts as down.
    """

    name = "sentinel"

    def __init__(self, master: RedisServer, master_name: str, down_after_ms: int) -> None:
        super().__init__()
        self._master = master
        self._master_name = master_name
        self._down_after_ms = down_after_ms

    def ask(self, *command: str) -> Reply:
        """Send ``SENTINEL`` with these words and the name of the master, and return the reply."""
        return ask(("127.0.0.1", self.port), "SENTINEL", *command, self._master_name)

    def count_as_down_after(self, milliseconds: int) -> None:
        """Set the silence after which the master counts as down."""
        setting = ("down-after-milliseconds", milliseconds)
        ask(("127.0.0.1", self.port), "SENTINEL", "SET", self._master_name, *setting)

    def counts_on_a_replica(self) -> bool:
        """Return whether the sentinel considers a replica alive."""
        replicas = self.ask("replicas")
        rows = [row for row in replicas if isinstance(row, list)] if isinstance(replicas, list) else []
        # A replica that counts as down has further flags.
        return any(
            dict(zip(map(str, row[::2]), row[1::2], strict=True)).get("flags") == "slave" for row in rows
        )

    def _run(self) -> ChildProcess:
        # A sentinel rewrites its configuration, so it needs a file.
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
        """Return whether the sentinel knows the replica."""
        try:
            replicas = self.ask("replicas")
        except ErrorReply:
            return False
        return isinstance(replicas, list) and any("master-link-status" in str(row) for row in replicas)


class SentinelPair(ServerGroup):
    """A master, its replica, and one sentinel that promotes the replica when the master is gone.

    Args:
        name: Name of the master in the sentinel.
        down_after_ms: Silence in milliseconds after which the master counts as down. With less than the
            default, a busy machine may cause a fail-over of a healthy master. :meth:`fail_over` uses a
            shorter time.
    """

    def __init__(self, *, name: str = "mymaster", down_after_ms: int = 5000) -> None:
        self.name = name
        # The roles at the start; a fail-over swaps them.
        self.master, self.replica = (RedisServer(config={"repl-diskless-sync-delay": 0}) for _ in range(2))
        self._down_after_ms = down_after_ms
        self._sentinel = Sentinel(self.master, name, down_after_ms)
        self.servers = (self._sentinel, self.replica, self.master)

    @property
    def sentinel_port(self) -> int:
        """The port of the sentinel on 127.0.0.1."""
        return self._sentinel.port

    def _start_all(self) -> None:
        self.master.start()
        self.replica.become_replica(self.master.port)
        self._await_step(self.master.start_timeout_s)
        self._sentinel.start()

    def master_port(self) -> int:
        """Return the port of the server that is the present master of the sentinel."""
        reply = self._sentinel.ask("get-master-addr-by-name")
        if not isinstance(reply, list) or len(reply) != 2:
            raise RuntimeError(f"the sentinel knows no master {self.name!r}: {reply!r}")
        return int(str(reply[1]))

    def fail_over(self, timeout_s: float = FAIL_OVER_S) -> None:
        """Kill the master and wait until the replica is promoted."""
        self.master.kill()
        self._sentinel.count_as_down_after(HASTE_MS)
        try:
            self.await_promotion(timeout_s)
        finally:
            self._sentinel.count_as_down_after(self._down_after_ms)

    def rejoin(self, timeout_s: float = FAIL_OVER_S) -> None:
        """Start the killed master again as a replica, after a fail-over, and wait until it is in sync.

        :attr:`master` and :attr:`replica` are swapped then, and another fail-over is possible.
        """
        self.master.become_replica(self.replica.port)
        self.master, self.replica = self.replica, self.master
        self._await_step(timeout_s)
        # Without a replica a fail-over would fail, and the sentinel would retry only after ten seconds.
        wait_until(self._sentinel.counts_on_a_replica, timeout_s, what="the sentinel to see the replica")

    def await_promotion(self, timeout_s: float = FAIL_OVER_S) -> None:
        """Wait until the replica is a master, also according to the sentinel."""
        wait_until(
            lambda: self.master_port() == self.replica.port and self.replica.is_master(),
            timeout_s,
            what="the promotion of the replica",
        )

    def url(self, db: int = 0, *, scheme: str = "sentinel") -> str:
        """Return the URL of the sentinel. The transport options name the master."""
        return f"{scheme}://127.0.0.1:{self.sentinel_port}/{db}"

    def _await_step(self, timeout_s: float) -> None:
        wait_until(self.replica.is_in_step, timeout_s, what="the replica in step with its master")
