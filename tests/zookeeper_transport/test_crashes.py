"""Consumers that die, sessions that expire, servers that restart: nothing is lost."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Consumer, Producer, Queue
from kombu.pidbox import Mailbox

from celery_dq.context import APP_CONTEXT, AppContext
from celery_dq.options import resolve
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.wiring import register_transports
from celery_dq.znodes import BrokerNodes
from celery_dq.zookeeper.session import Session
from tests.conformance.kombu_queue import KombuQueue, drain_idle, drain_until
from tests.curator.expiry import break_connection
from tests.preloaded import ROOT, PythonFork
from tests.zookeeper.removal import delete_chroot
from tests.zookeeper_transport.expiry import expire
from tests.zookeeper_transport.kinds import Connect, transport_of

NODES = BrokerNodes("online")


def test_an_idle_consumer_gets_the_items_of_an_expired_session(connect: Connect) -> None:
    # Given a consumer that holds two messages, and another consumer that waits
    holding = KombuQueue(connect(), "q")
    holding.publish("first", "second")
    holding.consume(prefetch_count=2)
    holding.drain(2, deadline=60)
    waiting = KombuQueue(connect(), "q")
    waiting.consume(ack=True)
    with pytest.raises(TimeoutError):
        waiting.connection.drain_events(timeout=0.3)
    # When the session of the first consumer ends
    expire(holding.connection)
    # Then the other consumer gets the messages although no new message has come, and the first consumer gets
    # an error.
    assert waiting.drain(2, deadline=60) == ["first", "second"]
    with pytest.raises(holding.connection.connection_errors):
        drain_until(holding.connection, lambda: False, deadline=60)
    # A late ack of the first consumer changes nothing.
    waiting.publish("third")
    holding.received[0].ack()
    assert waiting.drain(3, deadline=60) == ["first", "second", "third"]


def test_a_connection_whose_session_expired_while_nothing_was_consumed_is_used_again(
    connect: Connect,
) -> None:
    """The connection of a pool is in this state at the first ``inspect`` after a pause."""
    # The annotation of kombu's stubs is wrong.
    mailbox: Any = Mailbox("celery", type="fanout", accept=["json"])
    answering = connect()
    node = mailbox(answering).Node(
        "w", channel=answering.channel(), handlers={"ping": lambda state, **_: "pong"}
    )
    node.listen()
    asking = mailbox(connect())
    over = threading.Event()

    def answer() -> None:
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                answering.drain_events(timeout=0.1)

    answers = threading.Thread(target=answer)
    answers.start()
    try:
        assert asking.multi_call("ping", timeout=30, limit=1) == [{"w": "pong"}]
        expire(asking.connection)
        assert asking.multi_call("ping", timeout=30, limit=1) == [{"w": "pong"}]
    finally:
        over.set()
        answers.join()


def test_a_connection_that_broke_keeps_its_items(connect: Connect) -> None:
    room, other = KombuQueue(connect(), "q"), KombuQueue(connect(), "q")
    room.publish(*range(4))
    room.consume(prefetch_count=2)
    room.drain(2, deadline=60)
    other.consume(ack=True)
    assert other.drain(2, deadline=60) == [2, 3]
    break_connection(transport_of(room.connection).session)
    for message in room.received:
        message.ack()
    room.publish(4, 5)

    def all_came() -> bool:
        for each in (room, other):
            drain_idle(each.connection, timeout=0.05)
        return len(room.received) + len(other.received) >= 6

    wait_until(all_came)
    assert sorted(room.bodies + other.bodies) == [0, 1, 2, 3, 4, 5]


def test_a_server_that_restarts_loses_nothing(own_zookeeper: ZooKeeperServer) -> None:
    url = f"dq-zookeeper://{own_zookeeper.hosts}/x"
    options = {"session_timeout": 3}
    with Connection(url, transport_options=options) as connection:
        room = KombuQueue(connection, "q")
        room.publish(*range(10), priority=3)
        room.consume(prefetch_count=3)
        room.drain(3, deadline=60)
        own_zookeeper.kill()
        with pytest.raises(connection.connection_errors):
            drain_until(connection, lambda: False, deadline=60)
        with pytest.raises(connection.connection_errors):
            transport_of(connection).session.open(0.2)
        own_zookeeper.restart()
    with Connection(url, transport_options=options) as connection:
        room = KombuQueue(connection, "q")
        room.consume(ack=True)
        drain_until(connection, lambda: set(room.bodies) == set(range(10)), deadline=60)


def test_a_publish_outlasts_a_restart(own_zookeeper: ZooKeeperServer) -> None:
    with Connection(
        f"dq-zookeeper://{own_zookeeper.hosts}/x", transport_options={"session_timeout": 15}
    ) as connection:
        room = KombuQueue(connection, "q")
        room.publish("before")
        own_zookeeper.kill()
        back = threading.Timer(0.3, own_zookeeper.restart)
        back.start()
        room.publish("meanwhile", retry=True, retry_policy={"max_retries": 10, "interval_start": 0.1})
        back.join()
        room.consume(ack=True)
        assert room.drain(2, deadline=60) == ["before", "meanwhile"]


def test_a_deleted_chroot_is_made_again_and_its_consumers_connect_again(
    connect: Connect, zookeeper: ZooKeeperServer, hosts: str
) -> None:
    first, producing = KombuQueue(connect(), "q"), KombuQueue(connect(), "q")
    first.consume(ack=True)
    producing.publish("before")
    first.drain(1, deadline=60)
    delete_chroot(zookeeper, hosts)
    producing.publish("after", retry=True, retry_policy={"max_retries": 10, "interval_start": 0.1})
    # The session lives, but the presence node that is checked together with its locks is gone.
    with pytest.raises(first.connection.connection_errors):
        drain_until(first.connection, lambda: False, deadline=60)
    second = KombuQueue(connect(), "q")
    second.consume(ack=True)
    assert second.drain(1, deadline=60) == ["after"]


# -- consumers that are killed repeatedly ---------------------------------------------


def consume_forever(url: str, ledger: str) -> None:
    """Run a consumer process, which records each message and then acknowledges it."""
    register_transports()
    notes = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def on_message(message: Any) -> None:
        os.write(notes, b"%d\n" % message.payload)
        message.ack()

    while True:
        # A message that loses five consumers would become a dead letter; here every message must arrive.
        patient = AppContext("patient", lambda: resolve({"dq_max_deliveries": 1000}))
        connection = Connection(url, transport_options={"session_timeout": 1.5, APP_CONTEXT: patient})
        # On a busy machine, so short a session may expire although no process was killed.
        with contextlib.suppress(*connection.connection_errors), connection:
            consumer = Consumer(connection.channel(), [Queue("q")], on_message=on_message, prefetch_count=5)
            consumer.consume()
            while True:
                with contextlib.suppress(TimeoutError):
                    connection.drain_events(timeout=1)


def test_consumers_that_are_killed_over_and_over_lose_nothing(
    hosts: str, connect: Connect, looker: Session, tmp_path: Path
) -> None:
    amount, rng, ledger = 300, random.Random(7), tmp_path / "ledger"
    ledger.touch()
    channel = connect().channel()
    producer = Producer(channel)
    Queue("q")(channel).declare()
    program = ["-m", "tests.zookeeper_transport.test_crashes", f"dq-zookeeper://{hosts}", str(ledger)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    consumers: list[PythonFork] = []
    published = 0

    def hire() -> None:
        consumers.append(PythonFork(program, environment, tmp_path / "log"))

    def seen() -> set[int]:
        return set(map(int, ledger.read_bytes().split()))

    def wait_for(goal: int) -> None:
        wait_until(lambda: len(seen()) >= goal, 60, what=lambda: f"{len(seen())} of {goal}")

    def kill(position: int) -> None:
        consumer = consumers.pop(position)
        consumer.kill()
        consumer.wait(30)

    try:
        for _ in range(2):
            hire()
        for _ in range(4):
            target = min(amount, published + amount // 4)
            while published < target:
                producer.publish(published, routing_key="q", serializer="json")
                published += 1
            # Some messages later, a consumer is killed while it handles a message.
            wait_for(min(len(seen()) + rng.randrange(5, 25), published))
            kill(rng.randrange(len(consumers)))
            hire()
        wait_for(amount)
        nodes = NODES.queue("q")
        wait_until(lambda: not looker.open().get_children(nodes.ready), 60)
    finally:
        while consumers:
            kill(0)
    assert seen() == set(range(amount))
    wait_until(lambda: not looker.open().get_children(nodes.locks), 60)


if __name__ == "__main__":
    consume_forever(*sys.argv[1:])
