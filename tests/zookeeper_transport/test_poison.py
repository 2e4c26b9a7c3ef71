"""A message that crashes its consumers repeatedly is counted, delivered alone, and becomes a dead letter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery
from kombu import pools

import celery_dq
from celery_dq.clock import SystemClock
from celery_dq.curator.framing import frame, unframe
from celery_dq.errors import ConfigurationError, InvalidMessage, InvalidRequest
from celery_dq.inspector.dead_letters import DeadLetterFilter
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.zookeeper import fetcher as fetcher_module
from celery_dq.znodes import BrokerNodes
from celery_dq.zookeeper.session import Session
from tests.apps import DQCelery
from tests.conformance.kombu_queue import KombuQueue, drain_idle, drain_until
from tests.dq_command import run_dq
from tests.zookeeper_transport.expiry import expire
from tests.zookeeper_transport.kinds import Connect, stored

NODES = BrokerNodes("online").queue("q")


def lose(room: KombuQueue) -> None:
    """End a consumer's session as its crash would; its connection cannot be used any more."""
    expire(room.connection)
    with pytest.raises(room.connection.connection_errors):
        drain_until(room.connection, lambda: False, deadline=60)
    room.connection.close()


def taken(connect: Connect, amount: int = 1, **options: Any) -> KombuQueue:
    """Return a consumer that has taken `amount` messages."""
    room = KombuQueue(connect(), "q")
    room.consume(prefetch_count=amount, **options)
    room.drain(amount, deadline=60)
    return room


@pytest.fixture
def app(hosts: str) -> Iterator[DQCelery]:
    plain = Celery("t", broker=f"dq-zookeeper://{hosts}", set_as_current=False)
    plain.conf.broker_transport_options = {"session_timeout": 15}
    app: DQCelery = celery_dq.setup(plain)
    yield app
    app.close()
    pools.reset()


def kill(connect: Connect, times: int) -> None:
    """Let the first message of the queue lose `times` consumers."""
    for number in range(times):
        room = taken(connect)
        (message,) = stored(room)
        assert message.deliveries == number
        lose(room)


def test_crashes_are_counted_and_releases_are_not(connect: Connect) -> None:
    KombuQueue(connect(), "q").publish("poison")
    room = taken(connect)
    (message,) = stored(room)
    assert "redelivered" not in message.delivery_info
    assert (message.deliveries, message.headers.get("dq_deliveries")) == (0, None)
    # A requeue, a closed connection and a cancelled consumer do not count as lost consumers.
    message.requeue()
    room.drain(2, deadline=60)
    room.connection.close()
    room = taken(connect)
    assert stored(room)[0].deliveries == 0
    lose(room)
    (message,) = stored(taken(connect))
    assert message.delivery_info["redelivered"] is message.headers["redelivered"] is True
    assert message.deliveries == message.delivery_info["deliveries"] == message.headers["dq_deliveries"] == 1


def test_messages_in_an_inbox_are_released_uncounted(connect: Connect) -> None:
    room = KombuQueue(connect(), "q")
    room.publish("first", "second")
    room.consume()
    drain_until(room.connection, lambda: bool(room.received), deadline=60)
    room.connection.close()
    room = taken(connect, 2)
    assert [message.deliveries for message in stored(room)] == [0, 0]


def test_a_suspect_comes_alone_and_takes_no_neighbours_with_it(connect: Connect, looker: Session) -> None:
    KombuQueue(connect(), "q").publish("poison")
    kill(connect, 1)
    KombuQueue(connect(), "q").publish("a", "b", "c")
    room = KombuQueue(connect(), "q")
    room.consume()
    # With room for all messages, the suspect is still delivered alone. A node records its last consumer.
    room.drain(4, deadline=60)
    assert sorted(room.bodies) == ["a", "b", "c", "poison"]
    assert [message.deliveries for message in stored(room) if message.payload != "poison"] == [0, 0, 0]
    for message in room.received:
        message.ack()
    client = looker.open()
    wait_until(lambda: not client.get_children(NODES.ready))
    assert client.get_children(NODES.suspects) == []


def test_one_suspect_at_a_time(connect: Connect) -> None:
    KombuQueue(connect(), "q").publish("one", "two")
    lose(taken(connect, 2))
    KombuQueue(connect(), "q").publish("fine")
    room = KombuQueue(connect(), "q")
    room.consume()
    room.drain(2, deadline=60)
    drain_idle(room.connection)
    suspects = [message for message in stored(room) if message.deliveries]
    assert len(suspects) == 1
    assert "fine" in room.bodies
    suspects[0].ack()
    room.drain(3, deadline=60)
    assert sorted(room.bodies) == ["fine", "one", "two"]


def test_a_suspect_of_another_queue_comes_when_the_one_before_it_has_ended(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The periodic full look must not be the cause of the delivery.
    monkeypatch.setattr(fetcher_module, "LOOK_AROUND_S", 3600.0)
    for queue in ("q", "other"):
        room = KombuQueue(connect(), queue)
        room.publish(queue)
        room.consume()
        room.drain(1, deadline=60)
        lose(room)
    connection = connect()
    rooms = [KombuQueue(connection, queue) for queue in ("q", "other")]
    for room in rooms:
        room.consume()
    drain_until(connection, lambda: any(room.received for room in rooms), deadline=60)
    drain_idle(connection)
    first, second = sorted(rooms, key=lambda room: -len(room.received))
    assert (len(first.received), len(second.received)) == (1, 0)
    first.received[0].ack()
    second.drain(1, deadline=60)


def test_over_the_limit_it_is_a_dead_letter(connect: Connect, app: DQCelery, looker: Session) -> None:
    # Given a task that has lost five consumers
    task_id = app.send_task("poison", ("x",), {"y": 1}, queue="q", priority=4).id
    kill(connect, 5)
    # When the next consumer takes it
    room = KombuQueue(connect(), "q")
    room.publish("fine", priority=0)
    room.consume(ack=True)
    assert room.drain(1, deadline=60) == ["fine"]
    # Then it is not delivered, and becomes a dead letter with its reason and last worker.
    client = looker.open()
    wait_until(lambda: len(app.dq.dead_letters["q"]) == 1)
    assert client.get_children(NODES.dead) == [task_id]
    wait_until(lambda: not client.get_children(NODES.ready) and not client.get_children(NODES.locks))
    assert client.get_children(NODES.suspects) == []
    letters = app.dq.dead_letters["q"]
    assert "q" in app.dq.dead_letters
    (letter,) = letters.list()
    assert (letter.id, letter.reason, letter.deliveries) == (task_id, "max_deliveries", 5)
    assert (letter.task, letter.args, letter.kwargs) == ("poison", "('x',)", "{'y': 1}")
    assert letter.at is not None
    assert letter.worker.rpartition(":")[0]
    room.connection.close()
    # A replayed message starts with no lost consumers, and keeps its priority.
    assert letters.replay("unknown") == 0
    assert (letters.replay(), len(letters)) == (1, 0)
    (message,) = stored(taken(connect))
    assert (message.deliveries, message.properties["priority"]) == (0, 4)
    assert message.headers["id"] == task_id


def test_dead_letters_are_edited_and_deleted(connect: Connect, app: DQCelery) -> None:
    app.conf.dq_queues = {"q": {"max_deliveries": 1}}
    task_id = app.send_task("poison", ("x",), queue="q").id
    letters = app.dq.dead_letters["q"]

    def dead_letter() -> None:
        kill(connect, 1)
        with app.connection_for_read() as connection:
            assert KombuQueue(connection, "q").bound.get() is None
        wait_until(lambda: len(letters) == 1)

    dead_letter()
    found = letters.show(task_id)
    assert found is not None
    assert (found.args, found.letter.task, found.due) == (["x"], "poison", None)
    assert letters.show("unknown") is None
    for refused in (
        lambda: app.dq.queues["q"].pause(),
        lambda: app.dq.queues["q"].reschedule(task_id, countdown=1),
        lambda: app.dq.queues["q"].reprioritise(task_id, 1),
    ):
        with pytest.raises(ConfigurationError, match=r"no tenants, quotas, pauses, .*reprioritise"):
            refused()
    with pytest.raises(InvalidMessage, match="only args, kwargs, priority"):
        letters.edit(task_id, tenant="t")
    assert letters.edit("unknown", args=()) is None
    assert letters.edit(task_id, args=("other",), priority=7) == task_id
    room = taken(connect)
    assert room.received[0].payload[0] == ["other"]
    assert stored(room)[0].properties["priority"] == 7
    room.connection.close()
    dead_letter()

    # A deleted queue keeps its dead letters.
    with app.connection_for_write() as connection:
        channel: Any = connection.default_channel
        channel.queue_delete("q")
    assert json.loads(run_dq(app, "dead", "list", "q", "--json").output)[0]["id"] == task_id
    # A filter by tenant is a mistake here, and no search that finds nothing.
    refusal = "tenant = 'x': a dead letter in ZooKeeper has no tenant; leave out tenant"
    for words in (("list", "q"), ("replay", "q", "--dry-run")):
        assert refusal in run_dq(app, "dead", *words, "--tenant", "x", status=1).output
    with pytest.raises(InvalidRequest, match=refusal):
        letters.replay(wanted=DeadLetterFilter(tenant="x"))
    assert run_dq(app, "dead", "purge", "q", task_id).output == "Purged 1.\n"
    assert len(letters) == 0
    # The other operations need the dq-redis broker.
    with pytest.raises(ConfigurationError, match="dq-redis"):
        app.dq.queues["q"].tenants()


def test_a_dead_letter_that_is_due_later_waits_when_it_is_sent_again(
    connect: Connect, looker: Session
) -> None:
    # The message may have been dead-lettered on a machine whose clock was ahead.
    room = KombuQueue(connect(), "q")
    room.publish("x")
    client = looker.open()
    (name,) = client.get_children(NODES.ready)
    data = frame([*unframe(client.get(NODES.item(name))[0]), b"{}"])
    client.create(NODES.dead_letter("x"), data, makepath=True)
    due_ms = round(SystemClock().wall() * 1000) + 3_600_000
    assert room.channel.dead_letters("q").replay("x", lambda record: replace(record, due_ms=due_ms))
    assert client.get_children(NODES.ready) == [name]
    assert len(client.get_children(NODES.delayed)) == 1


def test_a_second_dead_letter_of_the_same_id(connect: Connect, app: DQCelery) -> None:
    app.conf.dq_queues = {"q": {"max_deliveries": 1}}
    for number in range(2):
        app.send_task("poison", (number,), queue="q", task_id="same")
        kill(connect, 1)
        with app.connection_for_read() as connection:
            assert KombuQueue(connection, "q").bound.get() is None
    wait_until(lambda: len(app.dq.dead_letters["q"]) == 2)
    assert sorted(letter.id.partition("~")[0] for letter in app.dq.dead_letters["q"].list()) == ["same"] * 2
    assert app.dq.dead_letters["q"].purge() == 2


def test_a_dead_letter_that_cannot_be_read_stops_no_other(app: DQCelery, looker: Session) -> None:
    app.send_task("post", queue="q", task_id="sound")
    client = looker.open()
    (name,) = client.get_children(NODES.ready)
    record = next(iter(unframe(client.get(NODES.item(name))[0])))
    for letter_id, data in (("sound", record), ("first", b"?")):
        client.create(NODES.dead_letter(letter_id), frame([data, b"{}"]), makepath=True)
    client.delete(NODES.item(name))
    letters = app.dq.dead_letters["q"]
    with pytest.raises(InvalidMessage, match="'first' of 'q' cannot be read"):
        letters.replay("first")
    assert letters.replay() == 1
    assert [each.id for each in letters.list()] == ["first"]
