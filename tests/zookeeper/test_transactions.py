"""Transactions, the journal that makes them happen once, custody under locks, and reading many nodes."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kazoo.exceptions import BadVersionError, NoNodeError, UnimplementedError

from celery_dq.errors import MessageTooLarge, ZooKeeperUnreachable
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.zookeeper import journal as journal_module
from celery_dq.zookeeper.custody import Custody, Outcome, Wanted
from celery_dq.zookeeper.journal import Journal
from celery_dq.zookeeper.reading import read_all, readings
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import (
    MAX_REQUEST,
    Refused,
    check,
    create,
    delete,
    set_data,
    size_of,
    transact,
)
from tests.broker.proxy import Proxy
from tests.curator.expiry import expire

JOURNALS = "/journals"


@pytest.fixture
def session(hosts: str) -> Iterator[Session]:
    session = Session(hosts, timeout_s=30)
    session.open().ensure_path("/items")
    session.open().ensure_path("/locks")
    yield session
    session.close()


@pytest.fixture
def client(session: Session) -> Any:
    return session.open()


def wanted(*names: str) -> list[Wanted]:
    return [Wanted(f"/items/{name}", f"/locks/{name}") for name in names]


def test_all_or_nothing(session: Session, client: Any) -> None:
    answers = transact(
        session, [create("/items/a", b"1"), create("/items/s-", sequence=True), check("/items")], 5
    )
    assert answers[:2] == ["/items/a", "/items/s-0000000001"]
    with pytest.raises(Refused) as refused:
        transact(session, [delete("/items/a"), set_data("/items", b"x", 7), create("/items/b")], 30)
    assert (refused.value.index, refused.value.step.path) == (1, "/items")
    assert isinstance(refused.value.error, BadVersionError)
    assert client.exists("/items/a")
    copy = pickle.loads(pickle.dumps(refused.value))
    assert (copy.index, str(copy)) == (1, str(refused.value))


@pytest.mark.parametrize("spare", [0, -1])
def test_what_fits_is_sent_and_what_does_not_is_refused(session: Session, client: Any, spare: int) -> None:
    step = create("/items/large", b"")
    room = MAX_REQUEST - size_of([step], client.chroot)
    transact(session, [create("/items/large", b"x" * (room + spare))], 30)
    with pytest.raises(MessageTooLarge):
        transact(session, [create("/items/larger", b"x" * (room + 1))], 30)
    # The connection has not suffered.
    assert client.exists("/items/larger") is None


def test_many_nodes_are_read_at_once(session: Session, client: Any) -> None:
    paths = [f"/items/{number}" for number in range(60)]
    for number, path in enumerate(paths[:-1]):
        client.create(path, b"" if number % 2 else b"x" * number)
    found = read_all(session, paths, 30)
    assert [data for data, _stat in found[:-1]] == [
        b"" if number % 2 else b"x" * number for number in range(59)
    ]
    assert found[3][1] == client.exists(paths[3])
    assert isinstance(found[-1], NoNodeError)
    # A server that does not know the request is asked for one after the other.
    assert readings(session, paths[:-1], [UnimplementedError()], 30) == found[:-1]


def test_a_journal_commits_for_many_threads(session: Session, client: Any) -> None:
    journal = Journal(session, JOURNALS)
    failures: list[Exception] = []

    def commit(thread: int) -> None:
        for number in range(10):
            try:
                journal.commit([create(f"/items/{thread}-{number}")], 30)
                journal.commit([create("/missing/x")], 30)
            except Refused as refusal:
                failures.append(refusal)

    threads = [threading.Thread(target=commit, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(client.get_children("/items")) == len(failures) == 60
    assert len(client.get_children(JOURNALS)) == 1
    journal.close()
    # It does not wait for long to hear that.
    wait_until(lambda: client.get_children(JOURNALS) == [])


def test_a_journal_survives_expiry_its_nodes_loss_and_a_fork(session: Session, client: Any) -> None:
    journal = Journal(session, JOURNALS)
    step = create("/items/s-", sequence=True)
    journal.commit([step], 30)
    expire(session)
    journal.commit([step], 30)
    (node,) = session.open().get_children(JOURNALS)
    session.open().delete(f"{JOURNALS}/{node}")
    outcomes = journal.commit_each([[step], [create("/missing/x")], [step]], 30)
    assert outcomes[0] == ["/items/s-0000000002"]
    assert isinstance(outcomes[1], Refused)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            journal.commit([step], 30)
            journal.close()
            session.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    journal.commit([step], 30)
    assert len(session.open().get_children("/items")) == 6


@pytest.mark.parametrize("drops", [1, 3])
def test_a_lost_answer_is_cleared_up(zookeeper: ZooKeeperServer, hosts: str, client: Any, drops: int) -> None:
    with Proxy(zookeeper.port) as proxy:
        session = Session(f"127.0.0.1:{proxy.port}/{hosts.partition('/')[2]}", timeout_s=30)
        journal = Journal(session, JOURNALS)
        step = create("/items/s-", sequence=True)
        journal.commit([step], 30)
        # With more than one drop, the answers to the questions are lost as well.
        proxy.drop_answers_to, proxy.drops_left = JOURNALS.encode(), drops
        assert journal.commit([step], 60) is None
        assert proxy.dropped == drops
        assert journal.commit([step], 30) == ["/items/s-0000000002"]
        session.close()
    assert len(client.get_children("/items")) == 3


def test_a_journal_gives_up_in_time(own_zookeeper: ZooKeeperServer) -> None:
    session = Session(own_zookeeper.hosts, timeout_s=2)
    journal = Journal(session, JOURNALS)
    journal.commit([create("/a")], 30)
    own_zookeeper.kill()
    with pytest.raises(ZooKeeperUnreachable, match="may be done|did not answer"):
        journal.commit([create("/b")], 0.3)
    own_zookeeper.restart()
    journal.commit([create("/c")], 60)
    session.close()


@pytest.mark.parametrize(("abandoned_s", "left"), [(86_400.0, 2), (0.0, 1)])
def test_what_crashed_writers_left_is_deleted(
    session: Session, client: Any, abandoned_s: float, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is not answered at once stays for the next writer.
    monkeypatch.setattr(journal_module, "CLEANUP_S", 30.0)
    crashed = Journal(session, JOURNALS)
    crashed.commit([check("/items")], 30)
    born = client.exists(f"{JOURNALS}/{client.get_children(JOURNALS)[0]}").mtime
    # Of the same millisecond, it would not be older.
    wait_until(lambda: client.set("/items", b"").mtime > born)
    Journal(session, JOURNALS, abandoned_s=abandoned_s).commit([check("/items")], 30)
    assert len(client.get_children(JOURNALS)) == left
    # It was not dead after all.
    crashed.commit([check("/items")], 30)


def test_custody_of_what_is_free(hosts: str, session: Session, client: Any) -> None:
    for name in "abc":
        client.create(f"/items/{name}", name.encode())
    mine = Custody(session, "/presences")
    theirs = Custody(session, "/presences")
    held = mine.take(wanted("a"))
    assert [each.data for each in held.held] == [b"a"]
    taken = theirs.take(wanted(*"abx"))
    assert [each.data for each in taken.held] == [b"b"]
    assert (taken.locked, taken.gone) == (wanted("a"), wanted("x"))
    # Nobody drops or releases what another one has, in the same session too.
    theirs.drop(wanted("a"))
    assert client.get_children("/locks") == ["a", "b"] or sorted(client.get_children("/locks")) == ["a", "b"]
    assert mine.finish(held.held) == [Outcome.DONE]
    assert mine.finish(held.held) == [Outcome.GONE]
    with pytest.raises(Refused):
        theirs.replace(taken.held[0], [create("/missing/b")])
    assert theirs.replace(taken.held[0], [create("/items/b2")]) is Outcome.DONE
    assert client.get_children("/locks") == []
    assert sorted(client.get_children("/items")) == ["b2", "c"]
    mine.close()
    theirs.close()
    assert client.get_children("/presences") == []


def test_custody_ends_with_its_session(hosts: str, session: Session, client: Any) -> None:
    client.create("/items/a")
    client.create("/items/b")
    custody, other = Custody(session, "/presences"), Session(hosts, timeout_s=30)
    held = custody.take(wanted("a", "b")).held
    assert custody.holds(held[0])
    expire(session)
    assert not custody.holds(held[0])
    thief = Custody(other, "/presences").take(wanted("a"))
    assert custody.finish(held) == [Outcome.LOST, Outcome.DONE]
    custody.release(held)
    assert other.open().get_children("/locks") == ["a"]
    assert Custody(other, "/presences").finish(thief.held) == [Outcome.LOST]
    other.close()
