"""A connection that got no answer never touches an item that another consumer has locked since."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kombu import Queue

from celery_dq.clock import SystemClock
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.transport.zookeeper.publisher import Item, ZooKeeperPublisher
from celery_dq.znodes import BrokerNodes
from celery_dq.zookeeper.session import Session
from tests.broker.proxy import Proxy
from tests.children import in_child
from tests.conformance.kombu_queue import KombuQueue
from tests.zookeeper_transport.kinds import Connect

NODES = BrokerNodes("online").queue("q")
#: A part of every request that takes an item or sends its end.
LOCK = b"/locks/queue-"


@pytest.fixture
def proxy(zookeeper: ZooKeeperServer) -> Iterator[Proxy]:
    with Proxy(zookeeper.port) as proxy:
        yield proxy


@pytest.fixture
def doubting(proxy: Proxy, hosts: str, connect: Connect) -> KombuQueue:
    """A consumer that is connected through the proxy; its session lasts longer than a test."""
    url = f"dq-zookeeper://127.0.0.1:{proxy.port}/{hosts.partition('/')[2]}"
    return KombuQueue(connect(url, session_timeout=60), "q")


def test_a_client_that_has_released_does_not_release_for_the_next(
    doubting: KombuQueue, proxy: Proxy, connect: Connect, looker: Session
) -> None:
    doubting.publish("x")
    consumer = doubting.consume()
    doubting.drain(1, deadline=60)
    consumer.cancel()
    other = KombuQueue(connect(), "q")
    other.consume()
    # The item is requeued, and the answer is held back until another consumer has the item.
    proxy.hold_answers_to, proxy.holds_left = LOCK, 1
    doubting.received[0].requeue()
    wait_until(lambda: proxy.held == 1)
    other.drain(1, deadline=60)
    proxy.cut_all()
    proxy.release_answers.set()
    # After the reconnect and before the close, the connection sends the acknowledgement again.
    doubting.publish("y")
    doubting.connection.close()
    assert looker.open().exists(NODES.lock(name_of(looker, 0))) is not None
    other.received[0].ack()
    wait_until(lambda: len(looker.open().get_children(NODES.ready)) == 1)
    assert other.drain(2, deadline=60) == ["x", "y"]


def test_a_client_without_the_lock_does_not_unlock_it(
    doubting: KombuQueue, proxy: Proxy, connect: Connect
) -> None:
    doubting.consume()
    other = KombuQueue(connect(), "q")
    # The request for the lock never arrives, and another consumer takes the item.
    proxy.swallow, proxy.swallows_left = LOCK, 1
    other.publish("x")
    wait_until(lambda: proxy.swallowed == 1)
    proxy.black_hole.set()
    other.consume(prefetch_count=1)
    other.drain(1, deadline=60)
    proxy.black_hole.clear()
    proxy.cut_all()
    other.publish("y")
    assert doubting.drain(1, deadline=60) == ["y"]


def test_a_message_that_was_locked_without_an_answer_is_delivered_once(
    doubting: KombuQueue, proxy: Proxy, connect: Connect, looker: Session
) -> None:
    doubting.consume(prefetch_count=1)
    # The request for the lock arrives, and its answer is lost.
    proxy.drop_answers_to, proxy.drops_left = LOCK, 1
    KombuQueue(connect(), "q").publish("x")
    assert doubting.drain(1, deadline=30) == ["x"]
    assert proxy.dropped == 1
    assert not doubting.received[0].delivery_info.get("redelivered")
    doubting.received[0].ack()
    wait_until(lambda: not looker.open().get_children(NODES.ready))
    assert looker.open().get_children(NODES.locks) == []


def test_a_forked_child_counts_in_a_node_of_its_own(hosts: str, connect: Connect, looker: Session) -> None:
    Queue("q")(connect().channel()).declare()
    item = Item("q", NODES.ready_prefix(0), b"data")
    session = Session(hosts, timeout_s=30)
    publisher = ZooKeeperPublisher(session, SystemClock())
    assert publisher.put([item], {}) is None
    stamp = publisher._writer._state.get().stamp
    assert stamp is not None
    # A request of the parent with this stamp never arrived.
    stamps = {"q": stamp}

    def child() -> None:
        publisher.put([item], {})
        session.close()

    in_child(child)
    assert publisher.put([item], stamps, "q") is None
    assert len(looker.open().get_children(NODES.ready)) == 3
    session.close()


def name_of(looker: Session, place: int) -> str:
    """Return the name of an item by its position in the queue; 0 is the oldest item."""
    names: list[str] = sorted(looker.open().get_children(NODES.ready))
    return names[place]
