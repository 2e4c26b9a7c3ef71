"""The size of a message, the number of messages, and purging."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from celery_dq.context import APP_CONTEXT, AppContext
from celery_dq.errors import MessageTooLarge
from celery_dq.options import resolve
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.zookeeper.fetcher import ZooKeeperFetcher
from celery_dq.znodes import BrokerNodes
from celery_dq.zookeeper.session import Session
from tests.conformance.kombu_queue import KombuQueue, drain_until
from tests.doubles.jumping_clock import JumpingClock
from tests.zookeeper_transport.expiry import expire
from tests.zookeeper_transport.kinds import Connect, stored, transport_of

NODES = BrokerNodes("online").queue("q")


def largest(room: KombuQueue) -> bytes:
    """Return the largest body that is accepted, in steps of 16 bytes; its message stays in the queue."""
    fits, fails = 1_000_000, 1_048_576
    while fails - fits > 16:
        size = (fits + fails) // 2
        try:
            room.publish(b"x" * size, serializer=None, content_type="application/data")
        except MessageTooLarge:
            fails = size
        else:
            fits = size
            room.bound.purge()
    room.publish(b"x" * fits, serializer=None, content_type="application/data")
    return b"x" * fits


def test_the_largest_message_can_be_released_and_given_up_on(connect: Connect) -> None:
    # Given a message of the maximum size
    strict = AppContext("strict", lambda: resolve({"dq_max_deliveries": 1}))
    options: dict[str, Any] = {APP_CONTEXT: strict}
    room = KombuQueue(connect(**options), "q")
    body = largest(room)
    # When it is requeued, its consumer is lost, and it becomes a dead letter
    room.consume(prefetch_count=1)
    room.drain(1, deadline=60)
    room.received[0].requeue()
    room.drain(2, deadline=60)
    expire(room.connection)
    with pytest.raises(room.connection.connection_errors):
        drain_until(room.connection, lambda: False, deadline=60)
    again = KombuQueue(connect(**options), "q")
    assert again.bound.get() is None
    # Then none of these requests was too large, and the replayed message is unchanged.
    dead_letters = again.channel.dead_letters("q")
    (letter,) = wait_until(dead_letters.list, 30)
    assert dead_letters.replay(letter.id)
    again.consume(ack=True)
    again.drain(1, deadline=60)
    assert stored(again)[0].body == body


def test_an_item_that_is_too_large_leaves_all_others_as_they_were(connect: Connect) -> None:
    room = KombuQueue(connect(), "q")
    room.publish("before")
    session = transport_of(room.connection).session.id
    with pytest.raises(MessageTooLarge, match="store the data elsewhere"):
        room.publish("x" * 1_100_000)
    room.publish("after")
    room.consume(ack=True)
    assert room.drain(2, deadline=60) == ["before", "after"]
    assert transport_of(room.connection).session.id == session


def test_many_messages_of_a_queue_with_a_long_name_are_moved_and_released_together(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The paths of so many nodes need more room than the data of the messages leave in a request.
    room = KombuQueue(connect(), "長" * 85)
    bodies = [f"{number:09000}" for number in range(100)]
    later = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1)
    room.publish(*bodies, headers={"eta": later.isoformat()})
    # All of them are due when they are consumed.
    clock = transport_of(room.connection).clock = JumpingClock()
    clock.set_wall_ahead(3600.0)
    room.consume(prefetch_count=len(bodies))
    assert sorted(room.drain(len(bodies))) == bodies
    # All are requeued before the fetcher sends a request.
    with monkeypatch.context() as patched:
        patched.setattr(ZooKeeperFetcher, "_may_ask", lambda _fetcher: False)
        for message in room.received:
            message.requeue()
    room.received.clear()
    room.channel.send_acks_now()
    assert sorted(room.drain(len(bodies))) == bodies


def test_counting_and_purging(connect: Connect, looker: Session) -> None:
    room = KombuQueue(connect(), "q")
    room.publish("held", "waits", "waits, too")
    due = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1)
    room.publish("delayed", headers={"eta": due.isoformat()})
    assert room.count() == 3
    room.consume(prefetch_count=1)
    room.drain(1, deadline=60)
    # Messages in flight and delayed messages do not count as waiting. A purge deletes all except those in
    # flight.
    wait_until(lambda: room.count() == 2)
    assert room.bound.purge() == 3
    assert room.count() == 0
    client = looker.open()
    assert client.get_children(NODES.delayed) == []
    room.received[0].requeue()
    room.drain(2, deadline=60)
    assert room.bodies == ["held", "held"]
    room.received[1].ack()
    wait_until(lambda: not client.get_children(NODES.ready))
