"""Expired sessions, broken connections, lost answers, and peers with other rules."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kazoo.security import make_digest_acl

from celery_dq.curator.queue import (
    DistributedIdQueue,
    DistributedPriorityQueue,
    DistributedQueue,
    LeasedItem,
    SimpleDistributedQueue,
)
from celery_dq.errors import AccessDenied, ZooKeeperUnreachable
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.zookeeper.session import Session
from tests.broker.proxy import Proxy
from tests.children import in_child
from tests.curator.collecting import Collector
from tests.curator.expiry import break_connection, expire
from tests.zookeeper.removal import delete_chroot

Make = Callable[..., Any]
LOCKS = "/locks"
both = pytest.mark.parametrize("lock_path", [None, LOCKS], ids=["deleting", "locking"])


@pytest.fixture
def proxy(zookeeper: ZooKeeperServer) -> Iterator[Proxy]:
    with Proxy(zookeeper.port) as proxy:
        yield proxy


@pytest.fixture
def through_proxy(proxy: Proxy, hosts: str) -> str:
    """Return the host list with the proxy's address."""
    return f"127.0.0.1:{proxy.port}/{hosts.partition('/')[2]}"


def test_an_item_that_waits_behind_a_dead_consumers_lock_is_served_at_once(make: Make) -> None:
    victim = make(DistributedQueue, lock_path=LOCKS)
    victim.put("x")
    received = victim.get(30)
    seen = Collector()
    make(DistributedQueue, lock_path=LOCKS, consumer=seen).start()
    expire(victim.session)
    # No item is put and the queue does not change: only the lock is gone.
    assert seen.wait(1) == ["x"]
    assert not received.finish() or received.finish()
    wait_until(lambda: victim.size() == 0)


def test_an_item_finished_after_its_session_is_finished_if_it_is_unlocked(make: Make) -> None:
    queue = make(DistributedQueue, lock_path=LOCKS)
    queue.put_each([1, 2])
    first, second = queue.get(30), queue.get(30)
    expire(queue.session)
    assert first.finish()
    assert queue.size() == 1
    other = make(DistributedQueue, lock_path=LOCKS)
    stolen = other.get(30)
    assert stolen.item == 2
    assert not second.finish()
    assert not second.requeue()
    second.release()
    # The lock of the new holder is unchanged.
    assert stolen.finish()
    assert queue.size() == 0


def test_an_item_deleted_by_a_peer_without_locks_counts_as_done(make: Make, session: Session) -> None:
    queue = make(DistributedQueue, lock_path=LOCKS)
    queue.put_each(["finished", "requeued", "lock gone", "put back"])
    finished, requeued, unlocked, requeued_twice = [queue.get(30) for _each in range(4)]
    client = session.open()
    client.delete(f"/queue/{finished.name}")
    client.delete(f"/queue/{requeued.name}")
    client.delete(f"{LOCKS}/{unlocked.name}")
    assert finished.finish()
    assert requeued.requeue()
    assert unlocked.finish()
    assert requeued_twice.requeue()
    assert client.get_children(LOCKS) == []
    assert queue.get(30).item == "put back"


@both
def test_consuming_goes_on_over_drops_and_expiries(make: Make, lock_path: str | None) -> None:
    seen = Collector()
    queue = make(DistributedQueue, lock_path=lock_path, consumer=seen).start()
    producer = make(DistributedQueue)
    for number in range(60):
        producer.put(number)
        if number % 20 == 5:
            break_connection(queue.session)
        if number % 20 == 10:
            expire(queue.session)
        if number % 20 == 15:
            break_connection(producer.session)
    wait_until(lambda: set(seen.items) == set(range(60)), 60, what=lambda: repr(seen.items))
    wait_until(lambda: producer.size() == 0)
    if lock_path is None:
        assert sorted(seen.items) == list(range(60))


@both
def test_consuming_goes_on_after_the_chroot_was_deleted(
    make: Make, lock_path: str | None, zookeeper: ZooKeeperServer, hosts: str
) -> None:
    seen = Collector()
    producer = make(DistributedQueue)
    make(DistributedQueue, lock_path=lock_path, consumer=seen).start()
    producer.put("before")
    seen.wait(1)
    delete_chroot(zookeeper, hosts)
    producer.put("after")
    assert seen.wait(2) == ["before", "after"]
    wait_until(lambda: producer.size() == 0)


def test_a_lost_answer_to_a_put_puts_once(proxy: Proxy, through_proxy: str, make: Make) -> None:
    queue = make(DistributedQueue, hosts=through_proxy)
    queue.put("first")
    for number in range(5):
        proxy.drop_answers_to, proxy.drops_left = b"queue-", 1
        queue.put(f"item {number}")
    proxy.drop_answers_to, proxy.drops_left = b"queue-", 1
    queue.put_each(["a", "b", "c"])
    assert proxy.dropped == 6
    reader = make(DistributedQueue)
    items = [reader.get(30).item for _each in range(reader.size())]
    assert items == ["first", *[f"item {number}" for number in range(5)], "a", "b", "c"]


def test_a_lost_answer_to_taking_an_element_does_not_lose_it(
    proxy: Proxy, through_proxy: str, make: Make
) -> None:
    elements = [str(number).encode() for number in range(6)]
    make(SimpleDistributedQueue).offer_each(elements)
    queue = make(SimpleDistributedQueue, hosts=through_proxy)
    taken = [queue.take()]
    for _each in elements[1:]:
        # The deletion is the only request that names the writer's node.
        proxy.drop_answers_to, proxy.drops_left = b"journals", 1
        taken.append(queue.take())
    assert taken == elements
    assert proxy.dropped >= 5


def test_a_lost_answer_to_a_removal_leaves_no_lock(
    proxy: Proxy, through_proxy: str, make: Make, session: Session
) -> None:
    queue = make(DistributedIdQueue, hosts=through_proxy, lock_path=LOCKS)
    queue.put("x", "an id")
    # The folder of the locks and the presence of this consumer exist.
    assert queue.remove("an id") == 1
    queue.put("y", "an id")
    proxy.drop_answers_to, proxy.drops_left = f"{LOCKS}/".encode(), 1
    with pytest.raises(ZooKeeperUnreachable):
        queue.remove("an id")
    assert session.open().get_children(LOCKS) == []
    assert make(DistributedIdQueue, lock_path=LOCKS).remove("an id") == 1


@pytest.mark.parametrize("drops", [1, 2])
def test_lost_answers_of_a_consumer_neither_lose_nor_strand(
    proxy: Proxy, through_proxy: str, make: Make, drops: int
) -> None:
    seen = Collector()
    producer = make(DistributedQueue)
    producer.put("first")
    make(DistributedQueue, hosts=through_proxy, lock_path=LOCKS, consumer=seen).start()
    seen.wait(1)
    for number in range(6):
        proxy.drop_answers_to, proxy.drops_left = b"presences", drops
        producer.put(number)
        seen.wait(number + 2)
    wait_until(lambda: producer.size() == 0)
    assert set(seen.items) == {"first", *range(6)}


@both
@pytest.mark.parametrize("way", ["requeue", "release"])
def test_an_item_that_is_requeued_or_released_again_after_an_outage_exists_once(
    proxy: Proxy, through_proxy: str, make: Make, lock_path: str | None, way: str
) -> None:
    queue = make(DistributedQueue, hosts=through_proxy, lock_path=lock_path, timeout_s=0.3)
    queue.put("first", timeout_s=30)
    received = queue.get(30)
    # The answers to all requests are lost until the caller gets an error.
    proxy.drop_answers_to, proxy.drops_left = b"/", 1_000_000
    wait_until(lambda: not ends(received, way) and proxy.dropped > 0)
    proxy.drops_left = 0
    queue.session.open(30)
    wait_until(lambda: ends(received, way))
    reader = make(DistributedQueue, lock_path=lock_path)
    assert reader.size() == 1
    assert reader.get(30).item == "first"


def ends(received: LeasedItem, way: str) -> bool:
    """Requeue or release an item; return False if ZooKeeper did not answer in time."""
    try:
        getattr(received, way)()
    except ZooKeeperUnreachable:
        return False
    return True


@pytest.mark.logged_error("The consumer of queue")
def test_a_failed_item_that_is_requeued_in_an_outage_exists_once(
    proxy: Proxy, through_proxy: str, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Collector(fail=lambda _item: not seen.failed)
    producer = make(DistributedQueue)
    producer.put("unique item")
    seen.gate.clear()
    with caplog.at_level("INFO", logger="celery_dq"):
        consumer = make(DistributedQueue, hosts=through_proxy, timeout_s=0.3, consumer=seen).start()
        assert seen.waiting.wait(30)
        # The answers to the creation of the item are lost until the consumer has given up twice.
        proxy.drop_answers_to, proxy.drops_left = b"unique item", 1_000_000
        seen.gate.set()
        wait_until(lambda: caplog.text.count("cannot finish nodes") >= 2)
        proxy.drops_left = 0
        seen.wait(1)
        wait_until(lambda: producer.size() == 0)
    consumer.close()
    assert (seen.failed, seen.items) == (["unique item"], ["unique item"])


def test_a_background_producer_waits_for_zookeeper_to_come_back(own_zookeeper: ZooKeeperServer) -> None:
    # This consumer outlives the server, and has all items at the end.
    session = Session(own_zookeeper.hosts, timeout_s=15)
    queue = DistributedQueue(session, "/queue", put_in_background=True, final_flush_s=0.2)
    queue.put(0)
    assert queue.flush(60)
    own_zookeeper.kill()
    for number in range(1, 50):
        queue.put(number)
    assert not queue.flush(0.1)
    assert queue.unsent()[-1] == 49
    own_zookeeper.restart()
    assert queue.flush(60)
    reader = DistributedQueue(session, "/queue", lock_path=LOCKS)
    assert [reader.get(30).item for _each in range(50)] == list(range(50))
    own_zookeeper.kill()
    queue.put("never")
    with pytest.raises(ZooKeeperUnreachable, match="1 items for /queue were not sent within 0.2 s"):
        queue.close()
    assert queue.unsent() == ["never"]
    session.close()


def test_a_server_that_is_away_is_reported_and_survived(own_zookeeper: ZooKeeperServer) -> None:
    session = Session(own_zookeeper.hosts, timeout_s=2)
    seen = Collector()
    producer = DistributedQueue(session, "/queue", timeout_s=0.5)
    producer.put(1, timeout_s=30)
    consumer = DistributedQueue(own_zookeeper.hosts, "/queue", lock_path=LOCKS, consumer=seen).start()
    seen.wait(1)
    own_zookeeper.kill()
    wait_until(lambda: session.state.value != "connected")
    with pytest.raises(ZooKeeperUnreachable, match="did not answer"):
        producer.put(2)
    with pytest.raises(ZooKeeperUnreachable):
        DistributedQueue(session, "/queue", timeout_s=0.2).poll()
    own_zookeeper.restart()
    session.open(60)
    producer.put(3, timeout_s=30)
    wait_until(lambda: 3 in seen.items, 60)
    consumer.close()
    producer.close()
    session.close()


def test_missing_rights_are_named(make: Make, session: Session) -> None:
    client = session.open()
    acl = [make_digest_acl("boss", "secret", all=True)]
    client.create("/queue", acl=acl)
    with pytest.raises(AccessDenied, match=r"does not let this session create /queue/queue-.*auth="):
        make(DistributedQueue).put(1)
    with pytest.raises(AccessDenied, match="read /queue"):
        make(DistributedIdQueue).poll()
    allowed = Session(session.hosts, auth=[("digest", "boss:secret")])
    DistributedQueue(allowed, "/queue").put(1)
    allowed.close()


@both
def test_an_item_whose_acl_keeps_us_out_is_passed_over_and_logged_once(
    make: Make, session: Session, lock_path: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    producer, seen = make(DistributedQueue), Collector()
    producer.put_each(["first", "theirs", "last"])
    client = session.open()
    theirs = sorted(client.get_children("/queue"))[1]
    client.set_acls(f"/queue/{theirs}", [make_digest_acl("boss", "secret", all=True)])
    make(DistributedQueue, lock_path=lock_path, consumer=seen).start()
    assert seen.wait(2) == ["first", "last"]
    producer.put("later")
    assert seen.wait(3) == ["first", "last", "later"]
    wait_until(lambda: client.get_children("/queue") == [theirs])
    reported = [record.getMessage() for record in caplog.records if theirs in record.getMessage()]
    assert len(reported) == 1, reported
    assert "its ACL denies this session" in reported[0]
    assert make(DistributedQueue, lock_path=lock_path).peek() is None


def test_a_lock_that_cannot_be_read_is_watched(make: Make, session: Session) -> None:
    """Curator's locks carry the ACLs of its own client."""
    producer, seen = make(DistributedQueue), Collector()
    producer.put("x")
    client = session.open()
    (name,) = client.get_children("/queue")
    client.ensure_path(LOCKS)
    client.create(f"{LOCKS}/{name}", acl=[make_digest_acl("boss", "secret", all=True)])
    make(DistributedQueue, lock_path=LOCKS, consumer=seen).start()
    producer.put("y")
    assert seen.wait(1) == ["y"]
    client.delete(f"{LOCKS}/{name}")
    assert seen.wait(2) == ["y", "x"]


def test_a_fork_has_a_session_of_its_own(make: Make) -> None:
    seen = Collector()
    queue = make(DistributedQueue, lock_path=LOCKS, consumer=seen).start()
    queue.put("parent")
    seen.wait(1)

    def child() -> None:
        queue.put("child")
        queue.close()
        queue.session.close()

    in_child(child)
    queue.put("parent again")
    assert sorted(seen.wait(3)) == ["child", "parent", "parent again"]


def test_nothing_stays_behind(make: Make, session: Session) -> None:
    before = set(threading.enumerate())
    queue = make(DistributedPriorityQueue, lock_path=LOCKS)
    queue.put(1, 1)
    queue.get(30).finish()
    client = session.open()
    assert len(client.get_children("/dq/journals")) == len(client.get_children("/dq/presences")) == 1
    queue.close()
    # Closing does not wait long for the deletion of these nodes.
    wait_until(lambda: client.get_children("/dq/journals") == client.get_children("/dq/presences") == [])
    names = [thread.name for thread in set(threading.enumerate()) - before]
    assert [name for name in names if name.startswith(("dq-take", "dq-finish", "dq-put"))] == []
