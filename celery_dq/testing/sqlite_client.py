"""An SQLite file with queues: its tables, a connection to it, and a call as one transaction."""

from __future__ import annotations

import functools
import os
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["SqliteCall", "SqliteClient"]

T = TypeVar("T")

#: Seconds to wait for another process's transaction.
BUSY_S = 10.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS queues (
    name TEXT PRIMARY KEY, transient INTEGER NOT NULL, used_us INTEGER NOT NULL, last_claim INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS bindings (
    exchange TEXT, routing_key TEXT, queue TEXT, transient INTEGER NOT NULL,
    PRIMARY KEY (exchange, routing_key, queue));
CREATE TABLE IF NOT EXISTS messages (
    place INTEGER PRIMARY KEY AUTOINCREMENT, queue TEXT NOT NULL, id TEXT NOT NULL, record BLOB NOT NULL,
    priority INTEGER NOT NULL, due_us INTEGER NOT NULL, expires_us INTEGER NOT NULL,
    deliveries INTEGER NOT NULL DEFAULT 0, returned INTEGER NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT '', consumer TEXT NOT NULL DEFAULT '', claim INTEGER NOT NULL DEFAULT 0,
    settled INTEGER NOT NULL DEFAULT 0, UNIQUE (queue, id));
CREATE INDEX IF NOT EXISTS waiting ON messages (queue, consumer, priority DESC, place);
CREATE TABLE IF NOT EXISTS leases (
    queue TEXT, consumer TEXT, until_us INTEGER NOT NULL, PRIMARY KEY (queue, consumer));
CREATE TABLE IF NOT EXISTS producers (
    queue TEXT, name TEXT, sequence INTEGER NOT NULL, used_us INTEGER NOT NULL, PRIMARY KEY (queue, name));
CREATE INDEX IF NOT EXISTS producers_by_use ON producers (queue, used_us);
CREATE TABLE IF NOT EXISTS dead_letters (
    queue TEXT, id TEXT, record BLOB NOT NULL, reason TEXT NOT NULL, worker TEXT NOT NULL,
    deliveries INTEGER NOT NULL, at_us INTEGER NOT NULL, PRIMARY KEY (queue, id));
"""


@functools.cache
def process_lock() -> threading.RLock:
    """Return the lock that a process holds while it uses SQLite, and while it forks.

    SQLite remembers the locks of a process in its memory. A child that is forked in the middle of a
    transaction would take the lock for one of its own connections, and wait for its end forever.
    """
    lock = threading.RLock()
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


class SqliteClient:
    """A connection to the file. Transactions of one process come one after the other.

    Args:
        path: Path of the file, which is created.

    Raises:
        sqlite3.OperationalError: The file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._lock = process_lock()
        with self._lock:
            self._connection = sqlite3.connect(
                path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            # Unlike with a write-ahead log, nothing is locked between two transactions, when a process forks.
            # A killed process loses nothing; a power cut may lose the last transactions.
            self._connection.execute("PRAGMA journal_mode = PERSIST")
            self._connection.execute("PRAGMA synchronous = OFF")
            self._connection.executescript(SCHEMA)

    def transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do `work` in one transaction.

        Raises:
            sqlite3.OperationalError: Other transactions took too long, or the disk is full; nothing was done.
        """
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                done = work(self._connection)
                self._connection.execute("COMMIT")
            except BaseException:
                # SQLite itself has rolled back after a full disk, for example, and not after a failed commit.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            return done

    def read(self, statement: str, *values: Any) -> list[Any]:
        """Return the rows of one statement."""
        with self._lock:
            return self._connection.execute(statement, values).fetchall()

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._connection.close()


@dataclass(frozen=True)
class SqliteCall(Generic[T]):
    """One transaction on a queue."""

    work: Callable[[sqlite3.Connection], T]

    def run(self, client: SqliteClient) -> T:
        """Do it."""
        return client.transact(self.work)
