"""The broker above a store of one's own: leases, lost workers, a store that fails, dead letters."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from celery import Celery
from kombu import Connection

import celery_dq
from celery_dq.errors import StoreUnreachable
from celery_dq.testing.sqlite_broker import SqliteClient, SqlitePartition, SqliteStore
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.any_store.fetcher import StoreFetcher
from tests.conformance.celery_app import CeleryApp
from tests.conformance.kombu_queue import KombuQueue, drain_until
from tests.doubles.thread_limit import no_more_threads

WAIT = 30


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "queues.sqlite")


def connection_of(path: str, **conf: Any) -> Connection:
    """A connection of an app with the shortest lease."""
    app = Celery("stores", broker=f"dq-sqlite:///{path}", set_as_current=False)
    app.conf.update({"dq_lease": 1, **conf})
    celery_dq.setup(app)
    return app.connection_for_read()


def test_a_lease_is_renewed_while_its_message_is_held(path: str) -> None:
    with connection_of(path) as connection:
        queue = KombuQueue(connection, "slow")
        queue.publish("long")
        queue.consume(prefetch_count=1)  # with room for a message, each claim would renew the lease, too
        queue.drain(1)
        client = SqliteStore(path).connect()
        ends = [client.read("SELECT until_us FROM leases")]
        wait_until(lambda: client.read("SELECT until_us FROM leases") != ends[0], WAIT)
        assert client.read("SELECT count(*) FROM messages WHERE consumer <> ''") == [(1,)]
        client.close()


def test_a_connection_sends_acks_after_its_thread_could_not_start(path: str) -> None:
    with connection_of(path) as connection:
        queue = KombuQueue(connection, "begun")
        queue.publish(1)
        with no_more_threads(), pytest.raises(RuntimeError):
            queue.channel.basic_get("begun")
        queue.channel.basic_get("begun").ack()
        client = SqliteStore(path).connect()
        wait_until(lambda: client.read("SELECT count(*) FROM messages") == [(0,)], 10)
        client.close()


def test_an_ack_that_is_under_way_is_not_confirmed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The term of a singleton queue waits for it before it ends."""
    begun, may_end = threading.Event(), threading.Event()
    ack = SqlitePartition.ack

    def slow(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        assert may_end.wait(WAIT)
        return ack(*args, **kwargs)

    monkeypatch.setattr(SqlitePartition, "ack", slow)
    with connection_of(path) as connection:
        channel = KombuQueue(connection, "ledger").channel
        KombuQueue(connection, "other").publish(1)
        KombuQueue(connection, "ledger").publish(1)
        channel.basic_get("ledger").ack()
        assert begun.wait(WAIT)
        assert channel.has_unconfirmed_acks("ledger")
        assert not channel.has_unconfirmed_acks("other")
        may_end.set()
        wait_until(lambda: not channel.has_unconfirmed_acks("ledger"), WAIT)


def test_the_prefetch_count_holds_from_the_first_claim(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = threading.Semaphore(0)
    version, add = SqliteStore.version, StoreFetcher.add

    def counted(store: SqliteStore, client: SqliteClient) -> object:
        rounds.release()
        return version(store, client)

    def slow(fetcher: StoreFetcher, *args: Any) -> None:
        add(fetcher, *args)
        for _ in range(5):  # the fetcher is faster than the thread that begins to consume
            assert rounds.acquire(timeout=WAIT)

    monkeypatch.setattr(SqliteStore, "version", counted)
    monkeypatch.setattr(StoreFetcher, "add", slow)
    with connection_of(path) as connection:
        queue = KombuQueue(connection, "begun")
        queue.publish(*range(5))
        queue.consume(prefetch_count=1)
        queue.drain(1)
        assert queue.count() == 4


@pytest.mark.parametrize("broker", ["sqlite"], indirect=True)
def test_the_message_of_a_killed_worker_returns_after_its_lease(celery_app: CeleryApp) -> None:
    key = uuid4().hex
    conf = {"dq_lease": 1}
    with celery_app.worker("prefork", concurrency=1, name="first", conf=conf) as first:
        result = celery_app.send("hold_late", key)
        celery_app.witness.wait(f"started:{key}")
        first.stop(signal.SIGKILL)
    with celery_app.worker("solo", name="second", conf=conf):
        celery_app.witness.wait(f"started:{key}")
        celery_app.witness.release(key, 2)
        assert result.get(timeout=WAIT) == key
    assert celery_app.waiting() == 0


@pytest.mark.parametrize("broker", ["sqlite"], indirect=True)
def test_an_unknown_task_is_a_dead_letter(celery_app: CeleryApp) -> None:
    path = celery_app.conf["broker_url"].removeprefix("dq-sqlite:///")
    client, calls = SqliteStore(path).connect(), SqliteStore(path).partition(celery_app.queue)
    with celery_app.worker("solo"):
        celery_app.app.send_task("unknown.task", queue=celery_app.queue)
        wait_until(lambda: calls.dead_letters().run(client), WAIT)
    assert "unknown task" in calls.dead_letters().run(client)[0].reason
    client.close()


def stop_outside_a_transaction(pid: int, path: str) -> bool:
    """Stop a process that does not hold the lock of the file; return whether it is stopped."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, WAIT)
    try:
        with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")
            db.execute("ROLLBACK")
    except sqlite3.OperationalError:
        os.kill(pid, signal.SIGCONT)
        return False
    return True


@pytest.mark.parametrize("broker", ["sqlite"], indirect=True)
def test_a_suspended_worker_declares_its_mailbox_again(celery_app: CeleryApp) -> None:
    store = SqliteStore(celery_app.conf["broker_url"].removeprefix("dq-sqlite:///"))
    client = store.connect()
    control = celery_app.app.control
    with celery_app.worker("solo", conf={"dq_lease": 1}) as worker:
        wait_until(lambda: control.ping(timeout=1), WAIT)
        mailbox = "%@%.celery.pidbox"
        wait_until(partial(stop_outside_a_transaction, worker.pid, store.path), WAIT)
        try:
            # Its mailbox and its leases are as old as those of a worker that has stood still for a minute.
            client.transact(
                lambda db: [
                    db.execute("UPDATE queues SET used_us = 0 WHERE name LIKE ?", (mailbox,)),
                    db.execute("UPDATE leases SET until_us = 0"),
                ]
            )
            store.queues(client).declare("of another user", transient=True)
            for table, column in (("queues", "name"), ("bindings", "queue")):
                left = f"SELECT count(*) FROM {table} WHERE {column} LIKE ?"
                assert client.read(left, mailbox) == [(0,)]
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        wait_until(lambda: control.ping(timeout=1), WAIT)
    client.close()


@pytest.mark.logged_error("disk I/O error")
def test_a_store_that_fails_ends_the_connection_and_loses_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = SqlitePartition.claim

    def failing(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(SqlitePartition, "claim", claim)
        raise sqlite3.OperationalError("disk I/O error")

    with connection_of(path) as connection:
        queue = KombuQueue(connection, "fragile")
        queue.publish("kept")
        monkeypatch.setattr(SqlitePartition, "claim", failing)
        queue.consume()
        with pytest.raises(StoreUnreachable, match="disk I/O error"):
            drain_until(connection, lambda: queue.received)
    with connection_of(path) as connection:
        successor = KombuQueue(connection, "fragile")
        successor.consume(ack=True)
        assert successor.drain(1) == ["kept"]


def test_a_store_that_has_lost_its_data_and_numbers_claims_again_is_served(path: str) -> None:
    with connection_of(path) as connection:
        queue = KombuQueue(connection, "restored")
        queue.publish("before")
        queue.consume(ack=True)
        assert queue.drain(1) == ["before"]

        def lose_leases(last_claim: int) -> None:
            """Let the store end all leases after this claim, and wait until the consumer has noticed it."""
            with closing(sqlite3.connect(path, timeout=WAIT)) as store, store:
                store.execute("UPDATE queues SET last_claim = ?", (last_claim,))
                store.execute("DELETE FROM leases")
            with closing(SqliteStore(path).connect()) as reader:
                wait_until(lambda: reader.read("SELECT * FROM leases"), WAIT, what="a new lease")

        lose_leases(1_000_000)
        lose_leases(0)
        queue.publish("after")
        assert queue.drain(2) == ["before", "after"]


def test_a_url_without_a_file_is_refused() -> None:
    with pytest.raises(celery_dq.ConfigurationError, match="dq-sqlite:///relative/path"):
        Connection("dq-sqlite://").connect()
