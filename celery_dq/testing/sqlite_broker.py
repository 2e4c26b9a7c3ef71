"""A broker in one SQLite file: ``dq-sqlite:///relative/path`` or ``dq-sqlite:////absolute/path``.

It needs no server, so tests of tasks can have a broker with leases, priorities, delays and dead letters, and
workers in other processes of the machine. It is not for production: one process at a time writes, and an idle
consumer looks at the file a hundred times a second. It is also the example of a store under a queue; see the
guide *Another store under a queue*.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from celery_dq.clock import Clock, SystemClock
from celery_dq.errors import ConfigurationError
from celery_dq.testing.sqlite_partition import SqliteClient, SqlitePartition
from celery_dq.transport.any_store.transport import StoreTransport
from celery_dq.transport.broker_url import take_apart
from celery_dq.transport.threaded_channel import Binding

__all__ = ["SqliteStore", "Transport"]

#: Seconds between two looks of an idle consumer.
LOOK_EVERY_S = 0.01
#: Seconds after which a transient queue without a use is deleted: its user was killed.
ABANDONED_S = 60.0


class SqliteQueues:
    """The queues of a file; see :class:`~celery_dq.transport.threaded_channel.QueueDirectory`.

    Args:
        store: The store.
        client: A connection to the file.
    """

    def __init__(self, store: SqliteStore, client: SqliteClient) -> None:
        self._store = store
        self._client = client

    def declare(self, queue: str, transient: bool = False) -> None:
        """Create a queue. Transient queues of users that were killed are deleted with each transient one."""
        now_us = int(self._store.clock.wall() * 1e6)

        def work(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT INTO queues VALUES (?, ?, ?, 0) ON CONFLICT (name) DO UPDATE SET used_us = ?",
                (queue, int(transient), now_us, now_us),
            )
            if transient:
                abandoned_us = now_us - int(ABANDONED_S * 1e6)
                rows = db.execute(
                    "SELECT name FROM queues WHERE transient AND used_us < ?", (abandoned_us,)
                ).fetchall()
                for (name,) in rows:
                    _delete(db, name)

        self._client.transact(work)

    def exists(self, queue: str) -> bool:
        """Whether any process has declared the queue."""
        return bool(self._client.read("SELECT 1 FROM queues WHERE name = ?", queue))

    def size(self, queue: str) -> int:
        """How many messages wait, without delayed messages and messages in flight."""
        return self._store.partition(queue).depth().run(self._client)

    def loads(self, queues: Sequence[str]) -> list[int | None]:
        """How many messages are in each queue; None for a queue that does not exist."""
        counted = "SELECT count(*) FROM messages WHERE queue = ?"
        return [
            int(self._client.read(counted, queue)[0][0]) if self.exists(queue) else None for queue in queues
        ]

    def purge(self, queue: str) -> int:
        """Delete the waiting and the delayed messages, but none in flight; return how many."""
        return self._store.partition(queue).purge().run(self._client).removed

    def delete(self, queue: str) -> None:
        """Delete the queue with its messages and transient bindings, except its dead letters."""
        self._client.transact(lambda db: _delete(db, queue))

    def leave(self, queue: str) -> None:
        """Delete a transient queue: it has one user."""
        self.delete(queue)


def _delete(db: sqlite3.Connection, queue: str) -> None:
    for table in ("messages", "leases"):
        db.execute(f"DELETE FROM {table} WHERE queue = ?", (queue,))  # noqa: S608 - names of two tables
    db.execute("DELETE FROM queues WHERE name = ?", (queue,))
    db.execute("DELETE FROM bindings WHERE queue = ? AND transient", (queue,))


class SqliteBindings:
    """The bindings in a file; see :class:`~celery_dq.transport.threaded_channel.BindingTable`.

    Args:
        client: A connection to the file.
    """

    def __init__(self, client: SqliteClient) -> None:
        self._client = client

    def bind(self, exchange: str, queue: str, routing_key: str, transient: bool) -> None:
        """Add a binding."""
        row = (exchange, routing_key, queue, int(transient))
        self._client.transact(
            lambda db: db.execute("INSERT OR IGNORE INTO bindings VALUES (?, ?, ?, ?)", row)
        )

    def unbind(self, exchange: str, queue: str, routing_key: str) -> None:
        """Remove a binding, if it exists."""
        row = (exchange, routing_key, queue)
        statement = "DELETE FROM bindings WHERE exchange = ? AND routing_key = ? AND queue = ?"
        self._client.transact(lambda db: db.execute(statement, row))

    def table(self, exchange: str, fresh: bool = False) -> list[Binding]:
        """Return the bindings of an exchange; a file has no older copies."""
        rows = self._client.read(
            "SELECT routing_key, queue, transient FROM bindings WHERE exchange = ?", exchange
        )
        return [Binding(routing_key, queue, bool(transient)) for routing_key, queue, transient in rows]


class SqliteStore:
    """The queues in one SQLite file.

    Args:
        path: Path of the file, which is created at the first connection.
        clock: Its wall time is the time of the store.
        marker_ttl_s: Seconds for which a batch of a producer is recognised when it is sent again.
    """

    look_every_s = LOOK_EVERY_S

    def __init__(self, path: str, clock: Clock | None = None, marker_ttl_s: float = 3600.0) -> None:
        self.path = path
        self.clock: Clock = clock or SystemClock()
        self._marker_ttl_s = marker_ttl_s

    def connect(self) -> SqliteClient:
        """Open the file."""
        return SqliteClient(self.path)

    def version(self, client: SqliteClient) -> object:
        """Return the number of SQLite that changes with each transaction of another connection."""
        return client.read("PRAGMA data_version")

    def partition(self, queue: str) -> SqlitePartition:
        """Return the calls on a queue."""
        return SqlitePartition(queue, self.clock.wall, self._marker_ttl_s)

    def queues(self, client: SqliteClient) -> SqliteQueues:
        """Return the queues of the file."""
        return SqliteQueues(self, client)

    def bindings(self, client: SqliteClient) -> SqliteBindings:
        """Return the bindings in the file."""
        return SqliteBindings(client)


class Transport(StoreTransport):
    """The kombu transport of ``dq-sqlite://``."""

    driver_type = "sqlite"
    driver_name = "sqlite3"
    can_parse_url = True
    connection_errors = (*StoreTransport.connection_errors, sqlite3.OperationalError)
    #: Without this attribute, kombu raises at the second failure in a row, despite the retry policy.
    recoverable_connection_errors = connection_errors

    def open_store(self) -> SqliteStore:
        """Return the store in the file that the URL names.

        Raises:
            ConfigurationError: The URL names no file.
        """
        take_apart(self.client)
        path = self.client.virtual_host
        if not path or path == "/":
            raise ConfigurationError(
                f"broker_url = '{self.client.transport_cls}:///' names no file: give"
                " dq-sqlite:///relative/path or dq-sqlite:////absolute/path"
            )
        return SqliteStore(path, self.clock, self.options.producer_marker_ttl_us / 1e6)

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """Return the URL of the file, which has no password."""
        return f"{self.client.transport_cls}:///{self.client.virtual_host}"

    def driver_version(self) -> str:
        """The version of SQLite."""
        return sqlite3.sqlite_version
