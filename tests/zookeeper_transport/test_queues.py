"""Delays, priorities and order; transient queues; foreign nodes; access rights."""

from __future__ import annotations

import datetime
import threading
import time
from typing import Any

import pytest
from kombu import Exchange, Producer, Queue

from celery_dq.clock import SystemClock
from celery_dq.errors import AccessDenied
from celery_dq.testing.waiting import wait_until
from celery_dq.transport import threaded_channel as channel_module
from celery_dq.transport.zookeeper import fetcher as fetcher_module
from celery_dq.transport.zookeeper.in_flight import ItemOutcome
from celery_dq.znodes import BrokerNodes
from celery_dq.zookeeper.session import Session
from tests.conformance.kombu_queue import KombuQueue, drain_idle, drain_until
from tests.zookeeper_transport.kinds import Connect, stored, transport_of

NODES = BrokerNodes("online")


def due(seconds: float) -> dict[str, object]:
    moment = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=seconds)
    return {"headers": {"eta": moment.isoformat()}}


def test_a_delayed_message_waits_in_the_broker_and_is_moved_once(connect: Connect) -> None:
    rooms = [KombuQueue(connect(), "q") for _ in range(3)]
    for room in rooms:
        room.consume(ack=True)
    began = time.time()
    rooms[0].publish("late", **due(2))
    rooms[0].publish("soon", **due(1.7))
    rooms[0].publish("now")
    assert rooms[0].count() <= 1

    def all_received() -> list[str]:
        for room in rooms:
            drain_idle(room.connection, timeout=0.05)
        return [body for room in rooms for body in room.bodies]

    wait_until(lambda: len(all_received()) >= 3)
    assert time.time() - began >= 2
    assert sorted(all_received()) == ["late", "now", "soon"]
    # The ETA has passed, so the worker must not hold the message back again.
    assert all(message.headers.get("eta") is None for room in rooms for message in room.received)


def test_requeueing_keeps_priority_place_and_delay(connect: Connect) -> None:
    room = KombuQueue(connect(), "q")
    room.publish("low", priority=1)
    room.publish("delayed", priority=5, **due(0.1))
    room.consume(prefetch_count=1)
    drain_until(room.connection, lambda: bool(room.received), deadline=60)
    time_to_be_due = SystemClock().wall() + 0.2
    wait_until(lambda: SystemClock().wall() > time_to_be_due)
    for _ in range(3):
        room.received.pop().requeue()
        assert room.drain(1, deadline=60) == ["delayed"]
        room.publish("later", priority=5)
    assert stored(room)[0].properties["priority"] == 5
    assert room.received[0].delivery_info["redelivered"]
    room.received.pop().ack()
    assert room.drain(1, deadline=60) == ["later"]


def test_no_later_message_is_taken_while_one_is_requeued(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "LOOK_AROUND_S", 600.0)
    room = KombuQueue(connect(), "q")
    room.publish("first", "later")
    room.consume(prefetch_count=1)
    room.drain(1, deadline=60)
    transport = transport_of(room.connection)
    in_flight, fetcher = transport.in_flight, transport._fetcher
    assert fetcher is not None
    add_outcome, run_round, begun = in_flight.add_outcome, fetcher.run_round, list[float]()

    def counted() -> float:
        begun.append(time.monotonic())
        return run_round()

    def has_begun(rounds: int) -> bool:
        fetcher.wake()
        return len(begun) >= rounds

    def add_between_rounds(verb: ItemOutcome, tag: str) -> None:
        # One whole round passes before the second one from now begins.
        second = len(begun) + 2
        wait_until(lambda: has_begun(second))
        add_outcome(verb, tag)
        # The fetcher rests before the message makes room.
        wait_until(lambda: not in_flight.has_returning)
        wait_until(lambda: not (fetcher._in_round or fetcher._waker.is_set))

    monkeypatch.setattr(fetcher, "run_round", counted)
    monkeypatch.setattr(in_flight, "add_outcome", add_between_rounds)
    room.received.pop().requeue()
    assert room.drain(1, deadline=30) == ["first"]


def test_a_message_is_requeued_in_a_later_request_than_acknowledgements(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "MAX_OUTCOMES_PER_CALL", 1)
    room = KombuQueue(connect(), "q")
    room.publish(*range(4))
    room.consume(prefetch_count=2)
    room.drain(2, deadline=60)
    (requeued, acknowledged), room.received = room.received, []
    transport = transport_of(room.connection)
    held = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(transport._fetcher, "run_round", lambda: held.set() or 60.0)  # type: ignore[func-returns-value]
        transport.look_again()
        assert held.wait(60)
        acknowledged.ack()
        requeued.requeue()
    transport.look_again()
    assert room.drain(2, deadline=60) == [0, 2]


def test_a_message_that_was_got_and_requeued_is_got_again(connect: Connect) -> None:
    room = KombuQueue(connect(), "q")
    room.publish("first", "second")
    for _ in range(3):
        message = room.bound.get()
        assert message is not None
        assert message.payload == "first"
        message.requeue()


def test_a_requeued_message_is_got_by_a_call_in_the_same_round(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = KombuQueue(connect(), "q")
    room.publish("first", "second")
    message = room.bound.get()
    assert message is not None
    fetcher = transport_of(room.connection)._fetcher
    assert fetcher is not None
    begin, has_begun = fetcher._begin_outcomes, threading.Event()

    def begin_before_the_requeue() -> Any:
        begun = begin()
        if not has_begun.is_set():
            has_begun.set()
            wait_until(lambda: fetcher._flushes)
        return begun

    monkeypatch.setattr(fetcher, "_begin_outcomes", begin_before_the_requeue)
    fetcher.wake()
    assert has_begun.wait(60)
    message.requeue()
    again = room.bound.get()
    assert again is not None
    assert again.payload == "first"


def test_folders_that_are_missing_are_made_again(connect: Connect, looker: Session) -> None:
    room = KombuQueue(connect(), "q")
    nodes = NODES.queue("q")
    for folder in (nodes.delayed, nodes.locks, nodes.unreadable):
        looker.open().delete(folder)
    room.consume(ack=True)
    room.publish("late", **due(1.7))
    room.publish("now")
    assert room.drain(2, deadline=60) == ["now", "late"]


def test_unreadable_items_are_kept_aside(connect: Connect, looker: Session) -> None:
    room = KombuQueue(connect(), "q")
    nodes = NODES.queue("q")
    looker.open().create(nodes.ready_prefix(9), b"not ours", sequence=True)
    looker.open().create(f"{nodes.delayed}/stranger", b"")
    room.publish("fine")
    room.consume(ack=True)
    assert room.drain(1, deadline=60) == ["fine"]
    wait_until(lambda: len(looker.open().get_children(nodes.unreadable)) == 1)
    wait_until(lambda: not looker.open().get_children(nodes.locks))


def test_an_item_that_a_peer_without_locks_took_counts_as_acknowledged(
    connect: Connect, looker: Session
) -> None:
    room = KombuQueue(connect(), "q")
    room.publish(*range(3))
    room.consume()
    room.drain(3, deadline=60)
    client, nodes = looker.open(), NODES.queue("q")
    client.delete(nodes.item(sorted(client.get_children(nodes.ready))[1]))
    for message in room.received:
        message.ack()
    wait_until(lambda: not client.get_children(nodes.ready) and not client.get_children(nodes.locks))


def test_a_transient_queue_goes_with_its_user(connect: Connect, looker: Session) -> None:
    exchange = Exchange("all", type="fanout")
    queue = Queue("mine", exchange, auto_delete=True, durable=False)
    room = KombuQueue(connect(), queue)
    assert looker.open().exists(NODES.queue("mine").ready)
    room.connection.close()
    assert not looker.open().exists(NODES.queue("mine").path)
    assert looker.open().get_children(NODES.transients) == []
    wait_until(lambda: looker.open().get_children(NODES.bindings("all")) == [])


def test_leftovers_of_a_crashed_process_are_removed(connect: Connect, looker: Session) -> None:
    connection = connect()
    KombuQueue(connection, Queue("kept", auto_delete=True))
    looker.open().ensure_path(f"{NODES.transients}/left")
    for folder in NODES.queue("left").folders:
        looker.open().ensure_path(folder)
    queues = transport_of(connection).queues
    queues.sweep()
    assert looker.open().exists(NODES.queue("left").path), "it may have been made a moment ago"
    queues.sweep()
    assert not looker.open().exists(NODES.queue("left").path)
    assert looker.open().get_children(NODES.transients) == ["kept"]


def test_broadcasts_to_a_silent_consumer_are_bounded(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "TRANSIENT_CAP", 3)
    exchange = Exchange("all", type="fanout")
    deaf = KombuQueue(connect(), Queue("deaf", exchange, auto_delete=True))
    keen = KombuQueue(connect(), Queue("keen", exchange, auto_delete=True))
    keen.consume(ack=True)
    producer = Producer(connect().channel(), exchange=exchange)
    for number in range(6):
        producer.publish(number, serializer="json")
        keen.drain(number + 1, deadline=60)
    assert keen.bodies == [0, 1, 2, 3, 4, 5]
    assert deaf.count() == 3


def test_an_environment_of_its_own(connect: Connect, hosts: str, looker: Session) -> None:
    from celery import Celery

    import celery_dq

    app = Celery("t", broker=f"dq-zookeeper://{hosts}", set_as_current=False)
    app.conf.dq_environment = "sandbox"
    celery_dq.setup(app)
    with app.connection_for_write() as connection:
        KombuQueue(connection, "q").publish(1)
        assert looker.open().exists("/dq/sandbox/broker/queues/q")
        assert not looker.open().exists("/dq/online")
    app.close()


def test_a_stranger_may_not_read_or_write(connect: Connect, hosts: str) -> None:
    host, _, folder = hosts.partition("/")
    owner = KombuQueue(connect(f"dq-zookeeper://shop:secret@{host}/{folder}"), "q")
    owner.publish(1)
    stranger = connect()
    with pytest.raises((AccessDenied, *stranger.channel_errors)):
        Producer(stranger.channel()).publish(2, routing_key="q")
    owner.consume(ack=True)
    assert owner.drain(1, deadline=60) == [1]


def test_an_ack_at_the_end_of_a_round_is_sent_before_the_connection_closes(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, has_ended, may_go_on = KombuQueue(connect(), "q"), threading.Event(), threading.Event()
    room.publish("a")
    room.consume()
    room.drain(1)
    fetcher = transport_of(room.connection)._fetcher
    assert fetcher is not None
    end_flushes = fetcher_module.ZooKeeperFetcher._end_flushes

    def held(*arguments: Any) -> None:
        has_ended.set()
        may_go_on.wait(30)
        waiting = len(fetcher._flushes)
        end_flushes(*arguments)
        if len(fetcher._flushes) < waiting:
            wait_until(lambda: fetcher._stopping)

    monkeypatch.setattr(fetcher_module.ZooKeeperFetcher, "_end_flushes", held)
    fetcher.wake()
    assert has_ended.wait(30)  # a round has seen that there is no ack
    room.received[0].ack()
    stopping = threading.Thread(target=fetcher.stop)
    stopping.start()
    wait_until(lambda: fetcher._flushes)
    may_go_on.set()
    stopping.join(30)
    room.connection.close()
    assert KombuQueue(connect(), "q").count() == 0
