"""A consumer of many queues ends all its waits in one step before a task that blocks its loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Thread
from typing import Any

import kombu
import pytest

from celery_dq.keys import wait_end
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.consuming import claim_limits, wakeups
from tests.broker.fetcher_harness import FetcherHarness, turn_until
from tests.broker.kombu_client import KombuClient
from tests.broker.proxy import Proxy
from tests.lua.partition_scripts import PartitionScripts

FIRST, SECOND = "first", "second"
NAMES = [f"q{number}" for number in range(100)]
#: Script calls of the claims, acks and handovers of one task, at most, however many queues there are.
FEW_CALLS = 10
#: Seconds by which a lost TCP segment may delay a request.
LATE_S = 1.5
#: No heartbeat runs within the test.
LEASE = "10m"


def calls(client: Any) -> int:
    """Return the number of script calls since the server began."""
    commands = client.info("commandstats")
    return sum(commands.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))


@pytest.fixture
def scripts(kombu_client: KombuClient) -> list[PartitionScripts]:
    return [PartitionScripts(kombu_client.client, name) for name in (FIRST, SECOND)]


@pytest.fixture
def solo(kombu_client: KombuClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[FetcherHarness]:
    """A consumer whose tasks block its loop; it waits for two groups of one queue each."""
    monkeypatch.setattr(wakeups, "GROUP_SIZE", 1)
    harness = FetcherHarness(kombu_client.url, 10, (FIRST, SECOND), holds=False)
    turn_until(lambda: harness.is_quiet, harness)
    yield harness
    harness.close()


def drain_until(connection: Any, condition: Callable[[], Any]) -> None:
    def drained() -> Any:
        with suppress(TimeoutError):
            connection.drain_events(timeout=0.05)
        return condition()

    wait_until(drained, interval_s=0.0)


def test_a_task_that_blocks_costs_few_calls_on_many_queues(
    kombu_client: KombuClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "GROUP_SIZE", 10)
    monkeypatch.setattr(claim_limits, "BRIEF_AHEADS", 0)  # each task may block for long
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
            fetcher = connection.default_channel.consumer.fetcher

            def is_quiet() -> bool:
                return fetcher.wakeups.is_waiting and not fetcher.expects_answer

            drain_until(connection, is_quiet)
            waits = [group.connection.connection for group in fetcher.wakeups]
            for number in range(1, 4):
                messages.publish(number, connection=publisher)
                published = calls(kombu_client.client)
                drain_until(connection, lambda: len(begun) > len(after))
                drain_until(connection, is_quiet)
                before.append(begun[-1] - published)
                after.append(calls(kombu_client.client) - begun[-1])
            assert [group.connection.connection for group in fetcher.wakeups] == waits
    # The heartbeat of an earlier test may have called, too.
    assert max(min(before), min(after)) <= FEW_CALLS, (before, after)


def test_another_consumer_gets_the_wakeup_that_comes_during_a_task(
    scripts: list[PartitionScripts], solo: FetcherHarness, kombu_client: KombuClient
) -> None:
    other = FetcherHarness(kombu_client.url, 10, (SECOND,))
    turn_until(lambda: other.is_quiet, other)
    solo.on_message = solo.fetcher.handovers.send_before_blocking
    scripts[0].push("task")
    turn_until(lambda: solo.got == ["task"], solo)
    scripts[1].push("meanwhile")
    turn_until(lambda: other.got == ["meanwhile"], other)  # the loop of the first one does not turn
    other.close()


def test_a_wakeup_that_came_before_the_wait_ended_is_handed_over(
    scripts: list[PartitionScripts], solo: FetcherHarness, kombu_client: KombuClient
) -> None:
    scripts[1].push("a")
    wait_until(solo.fetcher.wakeups.groups[1].connection.has_unread_input)
    solo.fetcher.handovers.send_before_blocking()
    assert [each.token() for each in scripts] == [False, True]
    # One end has found no wait. It costs the next wait of its group, or is forgotten.
    (end,) = kombu_client.client.keys(wait_end("online", "*"))
    assert 0 < kombu_client.client.pttl(end) <= wakeups.END_LIFE_MS
    turn_until(lambda: solo.got == ["a"] and solo.is_quiet, solo)


def test_a_wait_that_reaches_redis_after_its_end_is_over_at_once(
    redis_server: RedisServer, kombu_client: KombuClient
) -> None:
    client = kombu_client.client

    def release_a_second_later() -> None:
        wait_until(lambda: client.keys(wait_end("online", "*")))
        (end,) = client.keys(wait_end("online", "*"))
        begun = time.monotonic()
        wait_until(lambda: not client.exists(end) or time.monotonic() > begun + LATE_S)
        proxy.release_request.set()

    with Proxy(redis_server.port) as proxy:
        proxy.delay_request = b"BLPOP"
        late = FetcherHarness(proxy.redis_url(kombu_client.url), 10, (FIRST,), holds=False)
        turn_until(lambda: late.fetcher.wakeups.is_waiting and not late.fetcher.expects_answer, late)
        released = Thread(target=release_a_second_later)
        released.start()
        # Without its end, the wait outlasts the socket timeout.
        late.fetcher.handovers.send_before_blocking()
        released.join()
        assert not client.keys(wait_end("online", "*"))
        late.close()


def test_waits_end_while_redis_is_full(scripts: list[PartitionScripts], solo: FetcherHarness) -> None:
    client = scripts[0].client
    client.config_set("maxmemory", 1)
    try:
        solo.fetcher.handovers.send_before_blocking()
    finally:
        client.config_set("maxmemory", 0)
    assert not any(group.is_waiting for group in solo.fetcher.wakeups)
    assert not solo.fetcher._ready.relied_on
