"""Items under ephemeral locks."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import pytest

from celery_dq.errors import ZooKeeperUnreachable
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.zookeeper import item_locks as custody_module
from celery_dq.zookeeper.item_locks import FinishOutcome, ItemLocks, WantedItem
from celery_dq.zookeeper.multi_read import begin_reading
from celery_dq.zookeeper.session import PinnedSession, Session, SessionState
from celery_dq.zookeeper.transaction import TransactionRefused, create
from tests.curator.expiry import expire


def wanted(*names: str) -> list[WantedItem]:
    return [WantedItem(f"/items/{name}", f"/locks/{name}") for name in names]


def test_a_presence_that_is_being_made_is_not_a_lost_one(own_zookeeper: ZooKeeperServer) -> None:
    """Else another thread would end the connection, and early acks with it."""
    with closing(Session(own_zookeeper.hosts, timeout_s=30)) as session:
        session.open()
        locks = ItemLocks(session, "/presences")
        own_zookeeper.pause()
        asking = threading.Thread(target=locks.mine, args=([],))
        asking.start()
        wait_until(lambda: locks._state.get().lock.locked(), what="the request for the presence")
        try:
            assert not locks.is_lost
        finally:
            own_zookeeper.resume()
            asking.join()
        assert not locks.is_lost
        locks.close()


def test_item_locks_of_free_items(hosts: str, session: Session, client: Any) -> None:
    for name in "abc":
        client.create(f"/items/{name}", name.encode())
    mine = ItemLocks(session, "/presences")
    theirs = ItemLocks(session, "/presences")
    held = mine.take(wanted("a"))
    assert [each.data for each in held.held] == [b"a"]
    taken = theirs.take(wanted(*"abx"))
    assert [each.data for each in taken.held] == [b"b"]
    assert (taken.locked, taken.gone) == (wanted("a"), wanted("x"))
    # A consumer never drops or releases the lock of another one, even in the same session.
    theirs.drop(wanted("a"))
    assert client.get_children("/locks") == ["a", "b"] or sorted(client.get_children("/locks")) == ["a", "b"]
    assert mine.finish(held.held) == [FinishOutcome.DONE]
    assert mine.finish(held.held) == [FinishOutcome.GONE]
    with pytest.raises(TransactionRefused):
        theirs.replace(taken.held[0], [create("/missing/b")])
    assert theirs.replace(taken.held[0], [create("/items/b2")]) is FinishOutcome.DONE
    assert client.get_children("/locks") == []
    assert sorted(client.get_children("/items")) == ["b2", "c"]
    mine.close()
    theirs.close()
    assert client.get_children("/presences") == []


def test_item_locks_leaves_no_lock_of_an_item_that_a_peer_deletes_meanwhile(
    hosts: str, session: Session, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.create("/items/a")
    item_locks, peer = ItemLocks(session, "/presences"), Session(hosts, timeout_s=30)

    def late(client: Any, paths: list[str]) -> list[Any]:
        # The request for the lock was sent, and the request for the data was not sent yet.
        wait_until(lambda: peer.open().exists("/locks/a"))
        peer.open().delete("/items/a")
        return begin_reading(client, paths)

    monkeypatch.setattr(custody_module, "begin_reading", late)
    assert item_locks.take(wanted("a")).gone == wanted("a")
    assert client.get_children("/locks") == []
    peer.close()


def test_item_locks_of_an_item_whose_lock_was_deleted(session: Session, client: Any) -> None:
    client.create("/items/a")
    item_locks = ItemLocks(session, "/presences")
    (held,) = item_locks.take(wanted("a")).held
    client.delete(held.lock)
    assert item_locks.replace(held, [create("/items/a2")]) is FinishOutcome.DONE
    assert client.get_children("/items") == ["a2"]
    assert client.get_children("/locks") == []


def test_item_locks_makes_the_folder_of_the_locks(session: Session, client: Any) -> None:
    client.create("/items/a")
    client.delete("/locks")
    item_locks = ItemLocks(session, "/presences")
    taken = item_locks.take(wanted("a", "x"))
    assert ([each.name for each in taken.held], taken.gone) == (["a"], wanted("x"))
    # After a call without answer, a consumer finds out which locks are its own.
    assert item_locks.recover(wanted("a", "x")) == taken.held
    assert ItemLocks(session, "/presences").recover(wanted("a")) == []


def test_item_locks_of_a_pinned_session_take_nothing_in_the_next_one(session: Session, client: Any) -> None:
    client.create("/items/a")
    pinned = PinnedSession(session)
    item_locks = ItemLocks(pinned, "/presences")
    assert item_locks.mine(item_locks.take(wanted("a")).held)
    expire(session)
    assert pinned.is_over
    for _state in ("another session", "no session"):
        with pytest.raises(ZooKeeperUnreachable, match="has ended"):
            item_locks.take(wanted("a"))
        session.close()
    assert session.state is SessionState.CLOSED
