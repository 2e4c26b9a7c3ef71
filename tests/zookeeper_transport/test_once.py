"""A create whose answer is lost enqueues once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from kombu import Connection, Producer, Queue

from celery_dq.clock import SystemClock
from celery_dq.errors import ZooKeeperUnreachable
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.transport.zookeeper.publisher import Item, Publisher, Stamp
from celery_dq.znodes import JOURNALS, BrokerNodes
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import create, set_data, transact
from tests.broker.proxy import Proxy

NODES = BrokerNodes("online")


def bodies(connection: Connection, amount: int) -> list[Any]:
    """What is in the queue, taken out of it: so many messages, and what there is besides."""
    with connection.SimpleQueue("q") as simple:
        found: list[Any] = []
        while True:
            try:
                message = simple.get(timeout=60 if len(found) < amount else 0.3)
            except simple.Empty:
                return found
            message.ack()
            found.append(message.payload)


def test_a_lost_answer_to_a_create(
    zookeeper: ZooKeeperServer, hosts: str, connect: Callable[..., Connection]
) -> None:
    with Proxy(zookeeper.port) as proxy:
        folder = hosts.partition("/")[2]
        through = connect(f"dq-zookeeper://127.0.0.1:{proxy.port}/{folder}")
        channel = through.channel()
        producer = Producer(channel)
        Queue("q")(channel).declare()
        producer.publish("before", routing_key="q", serializer="json")
        proxy.drop_answers_to, proxy.drops_left = b"precious", 1
        producer.publish("precious", routing_key="q", serializer="json")
        assert proxy.dropped == 1
        with producer.batch() if hasattr(producer, "batch") else nullcontext():
            proxy.drops_left = 1
            for number in range(3):
                producer.publish(f"precious {number}", routing_key="q", serializer="json")
        producer.publish("after", routing_key="q", serializer="json")
    published = ["before", "precious", *[f"precious {n}" for n in range(3)], "after"]
    assert bodies(connect(), len(published)) == published


@pytest.mark.parametrize("carried_out", [True, False])
def test_another_connection_goes_on_with_a_publish_in_doubt(
    hosts: str, connect: Callable[..., Connection], looker: Session, carried_out: bool
) -> None:
    # Given an attempt of which nobody knows whether it was carried out, because its connection is gone
    Queue("q")(connect().channel()).declare()
    client = looker.open()
    node = client.create(f"{JOURNALS}/gone", b"", makepath=True)
    item = Item("q", NODES.queue("q").ready_prefix(0), b"data")
    if carried_out:
        steps = [set_data(node, b"", 0), create(item.prefix, item.data, sequence=True)]
        transact(looker, steps, 30)
    stamps = {"q": Stamp(node, 0)}
    # When another connection publishes it again, and again
    session = Session(hosts)
    publisher = Publisher(session, SystemClock())
    try:
        assert publisher.put([item], stamps, "q") is None
        assert publisher.put([item], stamps, "q") is None
        # Then it is there once, and others are not mistaken for it.
        assert len(client.get_children(NODES.queue("q").ready)) == 1
        assert publisher.put([item], {}, "q") is None
        assert len(client.get_children(NODES.queue("q").ready)) == 2
    finally:
        session.close()


def test_a_stamp_stays_on_what_got_no_answer(zookeeper: ZooKeeperServer, hosts: str) -> None:
    folder = hosts.partition("/")[2]
    with Proxy(zookeeper.port) as proxy:
        session = Session(f"127.0.0.1:{proxy.port}/{folder}", timeout_s=2)
        publisher = Publisher(session, SystemClock())
        item = Item("q", NODES.queue("q").ready_prefix(0), b"data")
        assert publisher.put([item], {}) == "q"
        proxy.black_hole.set()
        publisher._give_up_s = 0.3
        stamps: dict[str, Stamp] = {}
        with pytest.raises(ZooKeeperUnreachable):
            publisher.put([item], stamps, "q")
        assert stamps["q"].version == 0
        session.close()


def test_a_queue_that_was_deleted_meanwhile_is_made_again(connect: Callable[..., Connection]) -> None:
    publishing, deleting = connect(), connect()
    channel = publishing.channel()
    other: Any = deleting.channel()
    producer = Producer(channel)
    Queue("q")(channel).declare()
    producer.publish(1, routing_key="q", serializer="json")
    other.queue_delete("q")
    producer.publish(2, routing_key="q", serializer="json")
    assert bodies(connect(), 1) == [2]
