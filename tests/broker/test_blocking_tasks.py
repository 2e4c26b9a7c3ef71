"""A task that blocks the loop of a consumer of many queues costs few calls, and delays no other queue."""

from __future__ import annotations

import threading
from typing import Any

import kombu
import pytest

from celery_dq.transport.redis.consuming import channel_claims, subscriptions
from tests.broker.kombu_client import KombuClient

FIRST, SECOND = "first", "second"
NAMES = [f"q{number}" for number in range(100)]
#: Script calls of the claims, acks and handovers of one task, at most, however many queues there are.
FEW_CALLS = 10
#: No heartbeat runs within the test.
LEASE = "10m"


def calls(client: Any) -> int:
    """Return the number of script calls since the server began."""
    commands = client.info("commandstats")
    return sum(commands.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))


def test_a_task_that_blocks_costs_few_calls_on_many_queues(
    kombu_client: KombuClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "GROUP_SIZE", 10)
    monkeypatch.setattr(channel_claims, "BRIEF_AHEADS", 0)  # each task may block for long
    begun: list[int] = []
    before: list[int] = []
    after: list[int] = []

    def block(message: Any) -> None:
        begun.append(calls(kombu_client.client))
        message.ack()

    with kombu_client.connect(lease=LEASE) as connection, kombu_client.connect(lease=LEASE) as publisher:
        messages = KombuClient(kombu_client.url, "q5")
        queues = [kombu.Queue(name) for name in NAMES]
        with kombu.Consumer(connection, queues, on_message=block, accept=["json"]):
            wakeup_groups = connection.default_channel.consumer.claims.wakeups

            def is_quiet() -> bool:
                return bool(wakeup_groups.is_waiting)

            kombu_client.drain_until(connection, is_quiet)
            waits = [group.connection.connection for group in wakeup_groups]
            for number in range(1, 4):
                messages.publish(number, connection=publisher)
                published = calls(kombu_client.client)
                kombu_client.drain_until(connection, lambda: len(begun) > len(after))
                kombu_client.drain_until(connection, is_quiet)
                before.append(begun[-1] - published)
                after.append(calls(kombu_client.client) - begun[-1])
            assert [group.connection.connection for group in wakeup_groups] == waits
    # The heartbeat of an earlier test may have called, too.
    assert max(min(before), min(after)) <= FEW_CALLS, (before, after)


def test_another_consumer_gets_the_message_that_comes_during_a_task(kombu_client: KombuClient) -> None:
    began, goes_on, got = threading.Event(), threading.Event(), list[Any]()

    def block(message: Any) -> None:
        message.ack()
        began.set()
        assert goes_on.wait(60)

    def take(message: Any) -> None:
        got.append(message.payload)
        message.ack()

    queues = [kombu.Queue(name) for name in (FIRST, SECOND)]
    with (
        kombu_client.connect(lease=LEASE) as blocked,
        kombu_client.connect(lease=LEASE) as idle,
        kombu.Consumer(blocked, queues, on_message=block, accept=["json"]),
        kombu.Consumer(idle, queues[1:], on_message=take, accept=["json"]),
    ):
        KombuClient(kombu_client.url, FIRST).publish("task")
        blocking = threading.Thread(target=kombu_client.drain_until, args=(blocked, began.is_set))
        blocking.start()
        try:
            assert began.wait(30)
            for number in range(4):  # the wake-ups go to both consumers in turn
                KombuClient(kombu_client.url, SECOND).publish(number)
            kombu_client.drain_until(idle, lambda: sorted(got) == [0, 1, 2, 3])
        finally:
            goes_on.set()
            blocking.join()
