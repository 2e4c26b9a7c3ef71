"""Plain kombu on throttled queues: brief callbacks keep the next looks, and a long one loses none of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import kombu
import pytest

from celery_dq.transport.redis.consuming import channel_claims
from celery_dq.transport.redis.store.partition import Partition
from tests.broker.kombu_client import KombuClient, consumer_of
from tests.lua.partition_scripts import PartitionScripts

#: Queues with a quota each, and the messages/s of each.
QUEUES, RATE = tuple(f"throttled-{number}" for number in range(20)), 5
PLAIN = "plain"
#: Seconds until the next message of a slow queue is due: the consumers take up their positions before.
INTERVAL_S = 2.0
#: Short, because heartbeats find a look that is overdue, four times in a lease.
LEASE = "2s"


def throttle(kombu_client: KombuClient, queue: str, rate: float, messages: int) -> PartitionScripts:
    """Give this queue a quota and a backlog."""
    scripts = PartitionScripts(kombu_client.client, queue)
    scripts.set_quota("", rate=rate)
    KombuClient(kombu_client.url, queue).publish(*range(messages))
    return scripts


@contextmanager
def consuming(connection: Any, *queues: str, on_message: Callable[[Any], None]) -> Iterator[None]:
    """Consume these queues in the block."""
    channel = connection.default_channel
    names = [kombu.Queue(name) for name in queues]
    with kombu.Consumer(channel, names, on_message=on_message, prefetch_count=100, accept=["json"]):
        yield


def test_brief_callbacks_hand_no_next_look_over(
    kombu_client: KombuClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed_over: list[str] = []
    hand_over = Partition.hand_over_wakeup

    def count(partition: Partition, consumer: str = "") -> Any:
        handed_over.append(partition.keys.queue)
        return hand_over(partition, consumer)

    monkeypatch.setattr(Partition, "hand_over_wakeup", count)
    monkeypatch.setattr(channel_claims, "BRIEF_AHEADS", 1000)  # however busy the machine is
    got: list[str] = []
    for name in QUEUES:
        throttle(kombu_client, name, RATE, 20)

    def on_message(message: Any) -> None:
        got.append(message.queue)
        message.ack()

    with kombu_client.connect() as connection, consuming(connection, *QUEUES, on_message=on_message):
        kombu_client.drain_until(connection, lambda: len(got) >= len(QUEUES))
        handed_over.clear()  # the length of the first callback was not known before
        kombu_client.drain_until(connection, lambda: len(got) >= 8 * len(QUEUES))
        assert not handed_over


def test_another_consumer_finds_the_look_that_a_long_callback_neglects(kombu_client: KombuClient) -> None:
    slow_queue, messages = QUEUES[0], KombuClient(kombu_client.url, PLAIN)
    scripts = throttle(kombu_client, slow_queue, 1 / INTERVAL_S, 2)
    began, goes_on, stops = threading.Event(), threading.Event(), threading.Event()
    got: list[str] = []

    def block_sometimes(message: Any) -> None:
        got.append(message.queue)
        message.ack()
        if message.payload == "block":
            began.set()
            assert goes_on.wait(60)

    def take(message: Any) -> None:
        message.ack()
        if message.queue == slow_queue:
            goes_on.set()

    with kombu_client.connect(lease=LEASE) as first, kombu_client.connect(lease=LEASE) as second:
        with consuming(first, slow_queue, PLAIN, on_message=block_sometimes):
            messages.publish("brief")
            owner = consumer_of(first).encode()
            is_kept = partial(scripts.client.hget, scripts.keys.state, "next_look_owner")
            kombu_client.drain_until(first, lambda: len(got) == 2 and is_kept() == owner)
            messages.publish("block")
            runner = threading.Thread(target=kombu_client.drain_until, args=(first, stops.is_set))
            runner.start()
            try:
                assert began.wait(30)
                assert is_kept() == owner
                with consuming(second, slow_queue, on_message=take):
                    kombu_client.drain_until(second, goes_on.is_set)
            finally:
                goes_on.set()
                stops.set()
                runner.join()
        assert got.count(slow_queue) == 1
