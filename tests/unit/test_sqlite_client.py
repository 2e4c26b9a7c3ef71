"""Transactions on an SQLite file that fail at their end."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_dq.testing import sqlite_broker
from celery_dq.testing.sqlite_broker import SqliteClient


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "queues.sqlite")


@pytest.fixture
def client(path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqliteClient]:
    monkeypatch.setattr(sqlite_broker, "BUSY_S", 0.1)
    client = SqliteClient(path)
    yield client
    client.close()


def bind(client: SqliteClient, key: str) -> None:
    """Add a binding in a transaction."""
    client.transact(lambda db: db.execute("INSERT INTO bindings VALUES ('e', ?, 'q', 0)", (key,)))


def test_a_transaction_that_cannot_be_committed_is_rolled_back(client: SqliteClient, path: str) -> None:
    reader = sqlite3.connect(path)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM bindings").fetchone()
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        bind(client, "first")
    reader.close()
    other = SqliteClient(path)  # the lock of the first one is gone
    bind(other, "second")
    other.close()
    bind(client, "third")
    assert client.read("SELECT routing_key FROM bindings") == [("second",), ("third",)]


def test_a_full_disk_is_named(client: SqliteClient) -> None:
    client.read("PRAGMA max_page_count = 1")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        bind(client, "k" * 100_000)
    assert client.read("SELECT count(*) FROM bindings") == [(0,)]
