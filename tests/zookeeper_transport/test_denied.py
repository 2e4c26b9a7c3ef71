"""Items whose ACL denies a worker: the other items of their queue are served."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import pytest
from kazoo.security import ACL, make_acl, make_digest_acl

from celery_dq.testing.waiting import wait_until
from celery_dq.transport.zookeeper import fetcher as fetcher_module
from celery_dq.znodes import BrokerNodes
from celery_dq.zookeeper.session import Session
from tests.conformance.kombu_queue import KombuQueue, drain_idle, drain_until
from tests.zookeeper_transport.kinds import Connect

NODES = BrokerNodes("online").queue("q")
OWNER = make_digest_acl("boss", "secret", all=True)
#: The rights of a stranger to the item; consuming needs more in each case.
HIDDEN: Sequence[ACL] = [OWNER]
CHILDLESS: Sequence[ACL] = [OWNER, make_acl("world", "anyone", read=True, write=True)]
UNWRITABLE: Sequence[ACL] = [OWNER, make_acl("world", "anyone", read=True, create=True, delete=True)]


def protect(looker: Session, folder: str, acl: Sequence[ACL], at: int = 0) -> str:
    """Set the ACL of the item at this position of a folder, and return its path."""
    client = looker.open()
    path = f"{folder}/{sorted(client.get_children(folder))[at]}"
    client.set_acls(path, acl)
    return path


@pytest.mark.parametrize("acl", [HIDDEN, CHILDLESS], ids=["hidden", "childless"])
def test_an_item_whose_acl_keeps_us_out_is_passed_over_and_logged_once(
    connect: Connect, looker: Session, caplog: pytest.LogCaptureFixture, acl: Sequence[ACL]
) -> None:
    room = KombuQueue(connect(), "q")
    room.publish("first", "theirs", "last")
    theirs = protect(looker, NODES.ready, acl, at=1)
    # Take items one at a time first, then many at a time.
    room.consume(prefetch_count=1, ack=True)
    assert room.drain(2, deadline=30) == ["first", "last"]
    room.publish("later")
    assert room.drain(3, deadline=30)[2:] == ["later"]
    greedy = KombuQueue(connect(), "q")
    greedy.consume(ack=True)
    room.publish(*range(5))

    def all_came() -> bool:
        drain_idle(room.connection, 0.05)
        return len(room.bodies + greedy.bodies) == 8

    drain_until(greedy.connection, all_came)
    reported = [record.getMessage() for record in caplog.records if theirs in record.getMessage()]
    # Each of the two connections logs the item once.
    assert len(reported) == 2, reported
    assert "ACL" in reported[0]
    assert looker.open().exists(theirs) is not None


def test_a_delayed_item_whose_acl_keeps_us_out_is_passed_over(
    connect: Connect, looker: Session, caplog: pytest.LogCaptureFixture
) -> None:
    room = KombuQueue(connect(), "q")
    soon = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=1)
    room.publish("theirs", "ours", headers={"eta": soon.isoformat()})
    theirs = protect(looker, NODES.delayed, HIDDEN)
    room.consume(ack=True)
    assert room.drain(1, deadline=30) == ["ours"]
    room.publish("now")
    assert room.drain(2, deadline=30) == ["ours", "now"]
    assert [record.getMessage() for record in caplog.records if theirs in record.getMessage()]


@pytest.mark.parametrize("is_consumed", [True, False], ids=["consumed", "fetched one by one"])
def test_an_item_is_tried_again_when_its_acl_is_mended(
    connect: Connect, looker: Session, monkeypatch: pytest.MonkeyPatch, is_consumed: bool
) -> None:
    monkeypatch.setattr(fetcher_module, "LOOK_AROUND_S", 0.2)
    room = KombuQueue(connect(), "q")
    room.publish("theirs", "ours")
    theirs = protect(looker, NODES.ready, HIDDEN)

    def fetch() -> bool:
        message = room.bound.get()
        if message is not None:
            room.received.append(message)
        return message is not None

    if is_consumed:
        room.consume(ack=True)
        room.drain(1)
    else:
        wait_until(fetch)
        assert not fetch()
    # No watch fires when an ACL changes.
    owner = Session(looker.hosts, auth=[("digest", "boss:secret")])
    owner.open().set_acls(theirs, [make_acl("world", "anyone", all=True)])
    owner.close()
    if is_consumed:
        room.drain(2)
    else:
        wait_until(fetch)
    assert room.bodies == ["ours", "theirs"]


def test_an_item_that_may_not_be_written_comes_back_all_the_same(connect: Connect, looker: Session) -> None:
    room = KombuQueue(connect(), "q")
    room.publish("theirs")
    protect(looker, NODES.ready, UNWRITABLE)
    room.consume(prefetch_count=1)
    room.drain(1, deadline=30)
    room.received[0].requeue()
    assert room.drain(2, deadline=30) == ["theirs", "theirs"]
    room.received[1].ack()
    room.publish("ours")
    assert room.drain(3, deadline=30)[2:] == ["ours"]
