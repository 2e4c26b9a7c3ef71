"""A broker in one SQLite file: ``dq-sqlite:///relative/path`` or ``dq-sqlite:////absolute/path``.

It needs no server, so tests of tasks can have a broker with leases, priorities, delays and dead letters, and
workers in other processes of the machine. It is not for production: one process at a time writes, and an idle
consumer looks at the file a hundred times a second. It is also the example of a store under a queue; see the
guide *Another store under a queue*. It serves by priority and age, and has no tenants, quotas, cancellations
or dedup keys. Each call is one transaction.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from celery_dq.clock import Clock, SystemClock
from celery_dq.errors import ConfigurationError
from celery_dq.transport.any_store.transport import StoreTransport
from celery_dq.transport.broker_url import take_apart
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.partition_replies import (
    ClaimedEntry,
    ClaimReply,
    HeartbeatReply,
    OutgoingRecord,
    PurgeReply,
    PushReply,
    ReleaseMode,
)
from celery_dq.transport.threaded_channel import Binding

__all__ = ["SqliteStore", "Transport", "DeadLetterRow", "SqliteCall", "SqliteClient", "SqlitePartition"]

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
#: The reason of a message that has lost too many consumers.
EXHAUSTED = "dead:max_deliveries"


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


class DeadLetterRow(NamedTuple):
    """One dead letter: message id, record, reason, worker, number of lost consumers, and time in µs."""

    id: str
    record: bytes
    reason: str
    worker: str
    deliveries: int
    at_us: int


class SqlitePartition:
    """The calls on one queue.

    Args:
        queue: Name of the queue.
        wall: Returns the time in seconds since the epoch.
        marker_ttl_s: Seconds for which the last sequence of a silent producer is known.
    """

    def __init__(self, queue: str, wall: Callable[[], float], marker_ttl_s: float = 3600.0) -> None:
        self._queue = queue
        self._wall = wall
        self._marker_ttl_us = int(marker_ttl_s * 1e6)

    def _now_us(self) -> int:
        return int(self._wall() * 1e6)

    # -- waiting messages --------------------------------------------------------

    def push(self, messages: Sequence[OutgoingRecord], *, producer: str = "") -> SqliteCall[list[PushReply]]:
        """See :class:`PartitionStore`."""

        def work(db: sqlite3.Connection) -> list[PushReply]:
            return [self._push(db, message, producer) for message in messages]

        return SqliteCall(work)

    def _push(self, db: sqlite3.Connection, message: OutgoingRecord, producer: str) -> PushReply:
        if producer:
            known = db.execute(
                "SELECT sequence FROM producers WHERE queue = ? AND name = ?", (self._queue, producer)
            ).fetchone()
            is_seen, now_us = known is not None and message.sequence <= known[0], self._now_us()
            db.execute(
                "INSERT OR REPLACE INTO producers VALUES (?, ?, ?, ?)",
                (self._queue, producer, known[0] if is_seen else message.sequence, now_us),
            )
            db.execute(
                "DELETE FROM producers WHERE queue = ? AND used_us <= ?",
                (self._queue, now_us - self._marker_ttl_us),
            )
            if is_seen:
                return PushReply("seen", message.id)
        return PushReply("accepted", self._insert(db, message.id, message.record))

    def _insert(self, db: sqlite3.Connection, wanted: str, raw: bytes) -> str:
        """Insert a message behind those of its priority; return its id, with a number if it is taken."""
        record, message_id, number = MessageRecord.unpack(raw), wanted, 1
        while db.execute(
            "SELECT 1 FROM messages WHERE queue = ? AND id = ?", (self._queue, message_id)
        ).fetchone():
            message_id, number = f"{wanted}~{number}", number + 1
        db.execute(
            "INSERT INTO messages (queue, id, record, priority, due_us, expires_us)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (self._queue, message_id, raw, record.priority, record.due_us, record.expires_us),
        )
        return message_id

    def depth(self) -> SqliteCall[int]:
        """See :class:`PartitionStore`."""

        def work(db: sqlite3.Connection) -> int:
            (count,) = db.execute(
                "SELECT count(*) FROM messages WHERE queue = ? AND consumer = '' AND due_us <= ?"
                " AND reason = ''",
                (self._queue, self._now_us()),
            ).fetchone()
            return int(count)

        return SqliteCall(work)

    def purge(self) -> SqliteCall[PurgeReply]:
        """See :class:`PartitionStore`."""

        def work(db: sqlite3.Connection) -> PurgeReply:
            gone = db.execute("DELETE FROM messages WHERE queue = ? AND consumer = ''", (self._queue,))
            return PurgeReply(gone.rowcount, more=False)

        return SqliteCall(work)

    # -- leases ------------------------------------------------------------------

    def _renew(
        self, db: sqlite3.Connection, consumer: str, lease_ms: int, max_deliveries: int
    ) -> tuple[bool, int]:
        """Renew a lease and reap all that have expired.

        Returns:
            Whether the consumer had its lease until now, and the number of reaped messages.
        """
        now_us, reaped = self._now_us(), 0
        lost = db.execute(
            "SELECT consumer FROM leases WHERE queue = ? AND until_us <= ?", (self._queue, now_us)
        ).fetchall()
        for (name,) in lost:
            reaped += self._reap(db, name, max_deliveries)
        known = db.execute(
            "SELECT 1 FROM leases WHERE queue = ? AND consumer = ?", (self._queue, consumer)
        ).fetchone()
        db.execute(
            "INSERT OR REPLACE INTO leases VALUES (?, ?, ?)",
            (self._queue, consumer, now_us + lease_ms * 1000),
        )
        db.execute("UPDATE queues SET used_us = ? WHERE name = ?", (now_us, self._queue))
        return known is not None, reaped

    def _reap(self, db: sqlite3.Connection, consumer: str, max_deliveries: int) -> int:
        held = (self._queue, consumer)
        db.execute("DELETE FROM leases WHERE queue = ? AND consumer = ?", held)
        # A discard is handed out once: its bookkeeping may be the reason for which a consumer is lost.
        db.execute(
            "DELETE FROM messages WHERE queue = ? AND consumer = ? AND (settled OR reason <> '')", held
        )
        rows = db.execute("SELECT place FROM messages WHERE queue = ? AND consumer = ?", held).fetchall()
        for (place,) in rows:
            self._crashed(db, place, consumer, max_deliveries)
        return len(rows)

    def _crashed(self, db: sqlite3.Connection, place: int, worker: str, max_deliveries: int) -> None:
        """Return a message whose consumer was lost; it may become a dead letter, and then a discard."""
        db.execute(
            "UPDATE messages SET consumer = '', returned = 1, deliveries = deliveries + 1 WHERE place = ?",
            (place,),
        )
        message_id, record, deliveries = db.execute(
            "SELECT id, record, deliveries FROM messages WHERE place = ?", (place,)
        ).fetchone()
        if 0 < max_deliveries <= deliveries:
            db.execute("UPDATE messages SET reason = ? WHERE place = ?", (EXHAUSTED, place))
            self._keep_dead_letter(db, message_id, record, "max_deliveries", worker, deliveries)

    def _last_claim(self, db: sqlite3.Connection) -> int:
        found = db.execute("SELECT last_claim FROM queues WHERE name = ?", (self._queue,)).fetchone()
        return 0 if found is None else int(found[0])

    def _next_claim(self, db: sqlite3.Connection) -> int:
        db.execute(
            "INSERT INTO queues VALUES (?, 0, ?, 1)"
            " ON CONFLICT (name) DO UPDATE SET last_claim = last_claim + 1",
            (self._queue, self._now_us()),
        )
        return self._last_claim(db)

    def _next_end_us(self, db: sqlite3.Connection, consumer: str) -> int | None:
        (end,) = db.execute(
            "SELECT min(until_us) FROM leases WHERE queue = ? AND consumer <> ?", (self._queue, consumer)
        ).fetchone()
        return None if end is None else int(end)

    def heartbeat(
        self, consumer: str, *, lease_ms: int, max_deliveries: int = 5
    ) -> SqliteCall[HeartbeatReply]:
        """See :class:`PartitionStore`."""

        def work(db: sqlite3.Connection) -> HeartbeatReply:
            alive, reaped = self._renew(db, consumer, lease_ms, max_deliveries)
            end_us = self._next_end_us(db, consumer)
            next_end_s = float("inf") if end_us is None else (end_us - self._now_us()) / 1e6
            return HeartbeatReply(alive, reaped, claim=self._last_claim(db), next_end_s=next_end_s)

        return SqliteCall(work)

    def resign(self, consumer: str) -> SqliteCall[int]:
        """See :class:`PartitionStore`."""

        def work(db: sqlite3.Connection) -> int:
            held = (self._queue, consumer)
            db.execute("DELETE FROM messages WHERE queue = ? AND consumer = ? AND settled", held)
            db.execute("UPDATE messages SET consumer = '' WHERE queue = ? AND consumer = ?", held)
            db.execute("DELETE FROM leases WHERE queue = ? AND consumer = ?", held)
            return 0

        return SqliteCall(work)

    # -- deliveries --------------------------------------------------------------

    def claim(
        self, consumer: str, *, lease_ms: int, want: int, max_deliveries: int = 5, suspects: bool = True
    ) -> SqliteCall[ClaimReply]:
        """See :class:`PartitionStore`."""

        def work(db: sqlite3.Connection) -> ClaimReply:
            alive, _ = self._renew(db, consumer, lease_ms, max_deliveries)
            lost_up_to = None if alive else self._last_claim(db)
            found = self._eligible(db, want, suspects)
            if not found:
                more = bool(self._eligible(db, 1, suspects=True))
                next_look_s = self._next_look_s(db, consumer)
                return ClaimReply(more, next_look_s, 0, False, [], lost_up_to=lost_up_to, has_limits=False)
            number = self._next_claim(db)
            entries = []
            for place, message_id, deliveries, reason, record, returned in found:
                db.execute(
                    "UPDATE messages SET consumer = ?, claim = ? WHERE place = ?", (consumer, number, place)
                )
                entries.append(
                    ClaimedEntry(message_id, str(number), deliveries, reason, record, bool(returned))
                )
            suspect = entries[0].deliveries > 0 and not entries[0].reason
            return ClaimReply(True, None, 0, suspect, entries, lost_up_to=lost_up_to, has_limits=False)

        return SqliteCall(work)

    def _eligible(self, db: sqlite3.Connection, want: int, suspects: bool) -> list[Any]:
        """Return the rows of the next messages: a suspect alone, or others."""
        now_us = self._now_us()
        query = (
            "SELECT place, id, deliveries,"
            " CASE WHEN reason = '' AND expires_us > 0 AND expires_us <= ? THEN 'expired' ELSE reason END,"
            " record, returned FROM messages WHERE queue = ? AND consumer = '' AND due_us <= ?"
            " {} ORDER BY priority DESC, place LIMIT ?"
        )
        first = db.execute(query.format(""), (now_us, self._queue, now_us, 1)).fetchall()
        if first and first[0][2] > 0 and not first[0][3] and suspects:
            return first
        others = query.format("AND (deliveries = 0 OR reason <> '')")
        return db.execute(others, (now_us, self._queue, now_us, want)).fetchall()

    def _next_look_s(self, db: sqlite3.Connection, consumer: str) -> float | None:
        """Return the seconds until a delayed message is due or another lease expires; None for neither."""
        (due_us,) = db.execute(
            "SELECT min(due_us) FROM messages WHERE queue = ? AND consumer = '' AND due_us > ?",
            (self._queue, self._now_us()),
        ).fetchone()
        times = [at for at in (due_us, self._next_end_us(db, consumer)) if at is not None]
        return (min(times) - self._now_us()) / 1e6 if times else None

    def ack(
        self,
        consumer: str,
        *,
        settle: Sequence[tuple[str, str]] = (),
        finish: Sequence[tuple[str, str]] = (),
    ) -> SqliteCall[int]:
        """See :class:`PartitionStore`."""

        def work(db: sqlite3.Connection) -> int:
            settled = [self._change(db, "UPDATE messages SET settled = 1", consumer, tag) for tag in settle]
            finished = [self._change(db, "DELETE FROM messages", consumer, tag) for tag in finish]
            return [*settled, *finished].count(0)

        return SqliteCall(work)

    def _change(
        self, db: sqlite3.Connection, statement: str, consumer: str, tag: tuple[str, str], *values: Any
    ) -> int:
        """Change the row of a delivery; return 0 for a stale tag."""
        where = " WHERE queue = ? AND consumer = ? AND claim = ? AND id = ?"
        return db.execute(statement + where, (*values, self._queue, consumer, int(tag[0]), tag[1])).rowcount

    def _held(
        self, db: sqlite3.Connection, consumer: str, tag: tuple[str, str]
    ) -> tuple[int, bytes, int, int] | None:
        """Return place, record, settled and deliveries of a delivery; None for a stale tag."""
        found: tuple[int, bytes, int, int] | None = db.execute(
            "SELECT place, record, settled, deliveries FROM messages"
            " WHERE queue = ? AND consumer = ? AND claim = ? AND id = ?",
            (self._queue, consumer, int(tag[0]), tag[1]),
        ).fetchone()
        return found

    def release(
        self,
        consumer: str,
        tags: Sequence[tuple[str, str]],
        *,
        mode: ReleaseMode,
        max_deliveries: int = 5,
        worker: str = "",
    ) -> SqliteCall[int]:
        """See :class:`PartitionStore`."""

        def work(db: sqlite3.Connection) -> int:
            stale = 0
            for tag in tags:
                held = self._held(db, consumer, tag)
                if held is None:
                    stale += 1
                elif held[2]:
                    db.execute("DELETE FROM messages WHERE place = ?", held[:1])
                elif mode == "crashed":
                    self._crashed(db, held[0], worker or consumer, max_deliveries)
                else:
                    db.execute(
                        "UPDATE messages SET consumer = '', returned = max(returned, ?) WHERE place = ?",
                        (int(mode == "requeue"), held[0]),
                    )
            return stale

        return SqliteCall(work)

    # -- dead letters ------------------------------------------------------------

    def dead_letter(
        self, consumer: str, tag: tuple[str, str], *, reason: str, worker: str, record: bytes = b""
    ) -> SqliteCall[str]:
        """See :class:`PartitionStore`."""

        def work(db: sqlite3.Connection) -> str:
            held = self._held(db, consumer, tag)
            if held is None:
                return "stale"
            place, stored, _, deliveries = held
            self._keep_dead_letter(db, tag[1], record or stored, reason, worker, deliveries)
            db.execute("DELETE FROM messages WHERE place = ?", (place,))
            return "dead"

        return SqliteCall(work)

    def _keep_dead_letter(
        self, db: sqlite3.Connection, message_id: str, record: bytes, reason: str, worker: str, lost: int
    ) -> None:
        db.execute(
            "INSERT OR REPLACE INTO dead_letters VALUES (?, ?, ?, ?, ?, ?, ?)",
            (self._queue, message_id, record, reason, worker, lost, self._now_us()),
        )

    def dead_letters(self) -> SqliteCall[list[DeadLetterRow]]:
        """List the dead letters, the latest first."""

        def work(db: sqlite3.Connection) -> list[DeadLetterRow]:
            rows = db.execute(
                "SELECT id, record, reason, worker, deliveries, at_us FROM dead_letters WHERE queue = ?"
                " ORDER BY at_us DESC",
                (self._queue,),
            )
            return [DeadLetterRow(*row) for row in rows]

        return SqliteCall(work)

    def replay(self, message_id: str) -> SqliteCall[str | None]:
        """Send a dead letter again; the answer is its id, None without a dead letter of that id."""

        def work(db: sqlite3.Connection) -> str | None:
            dead = (self._queue, message_id)
            row = db.execute("SELECT record FROM dead_letters WHERE queue = ? AND id = ?", dead).fetchone()
            if row is None:
                return None
            db.execute("DELETE FROM dead_letters WHERE queue = ? AND id = ?", dead)
            return self._insert(db, message_id, row[0])

        return SqliteCall(work)


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
