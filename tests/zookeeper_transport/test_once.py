"""A create whose answer is lost enqueues a message once."""

from __future__ import annotations

import json
from contextlib import closing, nullcontext
from typing import Any

import pytest
from kazoo.security import make_acl
from kombu import Connection, Exchange, Producer, Queue

from celery_dq.clock import SystemClock
from celery_dq.errors import AccessDenied, ZooKeeperUnreachable
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.transport.packer import STAMPS
from celery_dq.transport.zookeeper.publisher import Item, ZooKeeperPublisher
from celery_dq.znodes import JOURNALS, BrokerNodes
from celery_dq.zookeeper.idempotent_writer import Stamp
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import create, set_data, transact
from tests.broker.proxy import Proxy
from tests.conformance.kombu_queue import KombuQueue
from tests.zookeeper_transport.kinds import Connect, stored, transport_of

NODES = BrokerNodes("online")


def bodies(connection: Connection, amount: int) -> list[Any]:
    """Take the expected number of messages from the queue, and any further ones, and return their bodies."""
    with connection.SimpleQueue("q") as simple:
        found: list[Any] = []
        while True:
            try:
                message = simple.get(timeout=60 if len(found) < amount else 0.3)
            except simple.Empty:
                return found
            message.ack()
            found.append(message.payload)


def message(channel: Any, body: str) -> dict[str, Any]:
    """Return a message in the form that channels publish."""
    prepared = channel.prepare_message(json.dumps(body), None, "application/json", "utf-8")
    assert isinstance(prepared, dict)
    return prepared


@pytest.mark.parametrize("drops", [1, 2])
def test_lost_answers_to_a_create(
    zookeeper: ZooKeeperServer, hosts: str, connect: Connect, drops: int
) -> None:
    with Proxy(zookeeper.port) as proxy:
        folder = hosts.partition("/")[2]
        through = connect(f"dq-zookeeper://127.0.0.1:{proxy.port}/{folder}")
        channel = through.channel()
        producer = Producer(channel)
        Queue("q")(channel).declare()
        producer.publish("before", routing_key="q", serializer="json")
        proxy.drop_answers_to, proxy.drops_left = b"precious", drops
        producer.publish("precious", routing_key="q", serializer="json")
        assert proxy.dropped == drops
        with producer.batch() if hasattr(producer, "batch") else nullcontext():
            proxy.drops_left = drops
            for number in range(3):
                producer.publish(f"precious {number}", routing_key="q", serializer="json")
        producer.publish("after", routing_key="q", serializer="json")
    published = ["before", "precious", *[f"precious {n}" for n in range(3)], "after"]
    assert bodies(connect(), len(published)) == published


@pytest.mark.parametrize("verb", ["ack", "requeue", "reject"])
def test_two_lost_answers_about_the_end_of_a_message(
    zookeeper: ZooKeeperServer,
    hosts: str,
    connect: Connect,
    looker: Session,
    verb: str,
) -> None:
    with Proxy(zookeeper.port) as proxy:
        folder = hosts.partition("/")[2]
        room = KombuQueue(connect(f"dq-zookeeper://127.0.0.1:{proxy.port}/{folder}"), "q")
        room.publish("first", "second")
        room.consume(prefetch_count=2)
        room.drain(2, deadline=30)
        # The answers to the transaction and to the question about its outcome are lost.
        proxy.drop_answers_to, proxy.drops_left = b"/locks/queue-", 2
        getattr(room.received[0], verb)()
        wait_until(lambda: proxy.dropped == 2)
        if verb == "requeue":
            assert room.drain(3, deadline=60) == ["first", "second", "first"]
            # No consumer was lost.
            assert stored(room)[2].deliveries == 0
            room.received[2].ack()
        room.received[1].ack()
        wait_until(lambda: looker.open().get_children(NODES.queue("q").ready) == [])
        assert room.bodies == ["first", "second", *(["first"] if verb == "requeue" else [])]


@pytest.mark.parametrize("carried_out", [True, False])
def test_another_connection_goes_on_with_a_publish_in_doubt(
    hosts: str, connect: Connect, looker: Session, carried_out: bool
) -> None:
    # Given an attempt of unknown outcome, because its connection is gone
    Queue("q")(connect().channel()).declare()
    client = looker.open()
    node = client.create(f"{JOURNALS}/gone", b"", makepath=True)
    item = Item("q", NODES.queue("q").ready_prefix(0), b"data")
    if carried_out:
        steps = [set_data(node, b"", 0), create(item.prefix, item.data, sequence=True)]
        transact(looker, steps, 30)
    stamps = {"q": Stamp(node, 0)}
    # When another connection publishes the message twice
    session = Session(hosts)
    publisher = ZooKeeperPublisher(session, SystemClock())
    with closing(session):
        assert publisher.put([item], stamps, "q") is None
        assert publisher.put([item], stamps, "q") is None
        # Then the queue has the message once, and another message is not mistaken for it.
        assert len(client.get_children(NODES.queue("q").ready)) == 1
        assert publisher.put([item], {}, "q") is None
        assert len(client.get_children(NODES.queue("q").ready)) == 2


def test_a_batch_that_grew_after_a_lost_answer_loses_nothing(
    zookeeper: ZooKeeperServer, hosts: str, connect: Connect, looker: Session
) -> None:
    with Proxy(zookeeper.port) as proxy:
        through = connect(f"dq-zookeeper://127.0.0.1:{proxy.port}/{hosts.partition('/')[2]}")
        channel: Any = through.channel()
        Queue("q")(channel).declare()
        publisher = transport_of(through).publisher
        batch = channel.create_publish_batch(10)
        batch.publish(message(channel, "before"), exchange="", routing_key="q")
        # With this flush, the producer creates its node.
        batch.flush()
        for number in range(2):
            batch.publish(message(channel, f"precious {number}"), exchange="", routing_key="q")
        # The messages are stored, and the answer does not arrive in time.
        proxy.hold_answers_to, proxy.holds_left = b"precious", 1
        publisher._give_up_s = 0.3
        with pytest.raises(ZooKeeperUnreachable):
            batch.flush()
        wait_until(lambda: proxy.held == 1)
        proxy.cut_all()
        proxy.release_answers.set()
        publisher._give_up_s = 30
        batch.publish(message(channel, "after"), exchange="", routing_key="q")
        batch.flush()
    assert len(looker.open().get_children(NODES.queue("q").ready)) == 4
    assert bodies(connect(), 4) == ["before", "precious 0", "precious 1", "after"]


@pytest.mark.parametrize(("kind", "is_denied"), [("topic", False), ("topic", True), ("fanout", True)])
def test_a_queue_that_has_a_message_does_not_get_it_again_with_the_second_queue(
    zookeeper: ZooKeeperServer,
    hosts: str,
    connect: Connect,
    looker: Session,
    kind: str,
    is_denied: bool,
) -> None:
    with Proxy(zookeeper.port) as proxy:
        folder = hosts.partition("/")[2]
        # The second attempt uses another connection, as in kombu.
        first, second = (connect(f"dq-zookeeper://127.0.0.1:{proxy.port}/{folder}") for _ in range(2))
        channels: list[Any] = [first.channel(), second.channel()]
        for channel in channels:
            for queue in ("a", "b", "c"):
                Queue(queue, Exchange("x", kind), routing_key="k")(channel).declare()
        published = message(channels[0], "precious")
        client = looker.open()
        if is_denied:
            client.set_acls(NODES.queue("b").ready, [make_acl("world", "anyone", read=True, admin=True)])
        else:
            proxy.swallow, proxy.swallows_left = NODES.queue("b").ready_prefix(0).encode(), 1
            transport_of(first).publisher._give_up_s = 0.3
        with pytest.raises(AccessDenied if is_denied else ZooKeeperUnreachable):
            channels[0].basic_publish(published, "x", "k")
        first.close()
        if is_denied:
            # The version of this node cannot tell any more whether the first queue has the message.
            wait_until(lambda: not client.get_children(JOURNALS))
            client.set_acls(NODES.queue("b").ready, [make_acl("world", "anyone", all=True)])
        channels[1].basic_publish(published, "x", "k")
        assert STAMPS not in published["properties"]
    for queue in ("a", "b", "c"):
        assert len(client.get_children(NODES.queue(queue).ready)) == 1, queue


def test_a_stamp_stays_on_a_message_without_an_answer(zookeeper: ZooKeeperServer, hosts: str) -> None:
    folder = hosts.partition("/")[2]
    with Proxy(zookeeper.port) as proxy:
        session = Session(f"127.0.0.1:{proxy.port}/{folder}", timeout_s=2)
        publisher = ZooKeeperPublisher(session, SystemClock())
        item = Item("q", NODES.queue("q").ready_prefix(0), b"data")
        assert publisher.put([item], {}) == "q"
        proxy.black_hole.set()
        publisher._give_up_s = 0.3
        stamps: dict[str, Stamp] = {}
        with pytest.raises(ZooKeeperUnreachable):
            publisher.put([item], stamps, "q")
        assert stamps["q"].version == 0
        session.close()


def test_a_queue_that_was_deleted_meanwhile_is_made_again(connect: Connect) -> None:
    publishing, deleting = connect(), connect()
    channel = publishing.channel()
    other: Any = deleting.channel()
    producer = Producer(channel)
    Queue("q")(channel).declare()
    producer.publish(1, routing_key="q", serializer="json")
    other.queue_delete("q")
    producer.publish(2, routing_key="q", serializer="json")
    assert bodies(connect(), 1) == [2]
