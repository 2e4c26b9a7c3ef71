"""Leases that several threads drop, and the watchdog, which suspects dead connections only."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import kombu
import pytest
import redis

from celery_dq.testing.waiting import wait_until
from tests.broker.kombu_client import KombuClient, bodies, consumer_of
from tests.broker.proxy import Proxy

QUICK: dict[str, Any] = {"lease": "1s", "watchdog": 0, "claim_ahead": "10ms"}


def watched(connection: Any, seconds: float) -> Any:
    """Return the consumer of a connection, with a watchdog period shorter than the options allow."""
    channel_consumer = connection.default_channel.consumer
    channel_consumer.watchdog.period_s = seconds
    return channel_consumer


@pytest.fixture
def hasty_switches() -> Iterator[None]:
    """Let the interpreter switch threads almost between any two instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty_switches")
def test_leases_dropped_in_several_threads_are_counted(kombu_client: KombuClient) -> None:
    with kombu_client.connect(**QUICK) as connection:
        channel: Any = connection.default_channel
        heartbeat, queue, me = (
            channel.identity.threads,
            channel.home(kombu_client.queue, ""),
            consumer_of(connection),
        )
        each_has, amount = 5000, 4
        for _ in range(each_has * amount + 1):
            heartbeat.keep_lease(queue, channel.thread_clients)

        def go() -> None:
            for _ in range(each_has):
                heartbeat.drop_lease(queue, soon=False)

        threads = [threading.Thread(target=go) for _ in range(amount)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

        def deadline() -> float:
            return float(kombu_client.client.zscore(kombu_client.keys.leases, me) or 0)

        # One holder of the lease is left.
        since = wait_until(deadline, 30)
        wait_until(lambda: deadline() > since + 1e6, 30, what="renewals for a second")
        heartbeat.drop_lease(queue)
        wait_until(
            lambda: not kombu_client.client.exists(kombu_client.keys.leases), 30, what="the end of the lease"
        )


def test_a_callback_that_takes_long_is_no_dead_connection(kombu_client: KombuClient) -> None:
    with kombu_client.connect(**QUICK) as connection:
        channel_consumer = watched(connection, 0.8)
        kombu_client.publish(*range(20), connection=connection)
        served: list[Any] = []

        def serve(message: Any) -> None:
            if message.payload == 10:
                # More than two checks of the watchdog.
                looks: list[float] = []
                channel_consumer._identity.threads.add_check(looks.append)
                wait_until(lambda: len(looks) >= 8, 30)
                channel_consumer._identity.threads.remove_check(looks.append)
            served.append(message.payload)
            message.ack()

        consumer = connection.Consumer([kombu.Queue(kombu_client.queue)], on_message=serve, accept=["json"])
        with consumer:
            kombu_client.drain_until(connection, lambda: len(served) >= 20, 30)
            assert sorted(served) == list(range(20))
            kombu_client.drain_until(connection, lambda: kombu_client.depth() == 0, 30)
        assert channel_consumer._identity.watchdog_strikes == 0


def test_a_consumer_that_claims_nothing_despite_a_backlog_connects_again(
    kombu_client: KombuClient, proxy: Proxy
) -> None:
    with kombu_client.connect(proxy.url(kombu_client.url), **QUICK) as connection:
        watched(connection, 0.3)
        # As after a connection was lost that the system still takes for open.
        proxy.swallow, proxy.swallows_left = b"BLPOP", 1
        with kombu_client.consuming(connection):
            kombu_client.drain_until(connection, lambda: proxy.swallowed)
            kombu_client.publish(2)
            failed: list[redis.ConnectionError] = []

            def turn() -> bool:
                try:
                    with contextlib.suppress(TimeoutError):
                        connection.drain_events(timeout=0.05)
                except redis.ConnectionError as error:
                    failed.append(error)
                return bool(failed)

            wait_until(turn, 30, interval_s=0.0)
            assert "dq_watchdog" in str(failed[0])
    with kombu_client.connect(**QUICK) as connection, kombu_client.consuming(connection) as got:
        kombu_client.drain(connection, got, 1, 30)
        assert bodies(got) == [2]
        got[0].ack()


@pytest.mark.parametrize("what", ["channel", "connection"])
def test_a_callback_may_close_its_channel_or_connection(kombu_client: KombuClient, what: str) -> None:
    kombu_client.publish(1, 2)
    with kombu_client.connect(**QUICK) as connection:
        served: list[Any] = []

        def serve(message: Any) -> None:
            served.append(message.payload)
            message.ack()
            (message.channel if what == "channel" else connection).close()

        consumer = connection.Consumer([kombu.Queue(kombu_client.queue)], on_message=serve, accept=["json"])
        consumer.consume()
        wait_until(lambda: (connection.drain_events(timeout=1), served)[1], 30)
        assert served == [1]
    wait_until(lambda: kombu_client.depth() == 1, 30)
