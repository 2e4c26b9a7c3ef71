"""What the keeper does for one queue whatever has happened to another, and whom the watchdog suspects."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import kombu
import pytest
import redis

from celery_dq.keys import PartitionKeys
from celery_dq.testing.waiting import wait_until
from tests.broker.counter import Counter, bodies, consumer_of

QUICK: dict[str, Any] = {"lease": "1s", "watchdog": 0, "claim_ahead": "10ms"}


def watched(connection: Any, seconds: float) -> Any:
    """The intake of a connection, with a watchdog that is quicker than the options allow."""
    intake = connection.default_channel.intake
    intake.watchdog.period_s = seconds
    return intake


def test_a_queue_whose_keys_are_foreign_takes_no_lease_from_another(counter: Counter) -> None:
    sick = PartitionKeys("online", "a-sick-one")
    with counter.connect(**QUICK) as connection:
        consumer = connection.Consumer(
            [kombu.Queue("a-sick-one"), kombu.Queue(counter.queue)], accept=["json"]
        )
        with consumer:
            me = consumer_of(connection)
            wait_until(lambda: counter.client.zscore(counter.keys.leases, me), 30)
            counter.client.delete(sick.leases)
            counter.client.set(sick.leases, "somebody else's")

            def renewed_since(deadline: float) -> bool:
                return bool(counter.client.zscore(counter.keys.leases, me) > deadline)

            for _ in range(3):
                before = counter.client.zscore(counter.keys.leases, me)
                wait_until(
                    partial(renewed_since, before),
                    30,
                    what="a renewal of the other queue",
                )
            counter.client.delete(sick.leases)
            wait_until(lambda: counter.client.zscore(sick.leases, me), 30, what="a renewal of the sick one")


def test_who_was_away_takes_nobody_for_dead_at_once(counter: Counter) -> None:
    counter.publish(1)
    counter.partition.claim("other", lease_ms=60_000, want=1).run(counter.client)
    with counter.connect(lease="40s") as connection, counter.consuming(connection):
        process = connection.transport.session.process
        me = consumer_of(connection)
        process.keeper.ring()
        wait_until(lambda: counter.client.zscore(counter.keys.leases, me), 30)
        # As if the machine had stood still: the other one may go on in a moment, as we do.
        counter.client.zadd(counter.keys.leases, {"other": 1, me: 1})
        rounds: list[float] = []
        process.keeper.watch(rounds.append)
        process.keeper.ring()
        wait_until(lambda: rounds, 30)
        process.keeper.unwatch(rounds.append)
        assert counter.client.zscore(counter.keys.leases, "other") == 1


@pytest.fixture
def hasty_switches() -> Iterator[None]:
    """The interpreter changes threads between any two instructions, nearly."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty_switches")
def test_users_of_a_queue_that_go_in_several_threads_are_counted(counter: Counter) -> None:
    with counter.connect(**QUICK) as connection:
        channel: Any = connection.default_channel
        keeper, queue, me = channel.process.keeper, channel.queue(counter.queue), consumer_of(connection)
        each_has, amount = 5000, 4
        for _ in range(each_has * amount + 1):
            keeper.use(queue, channel.keeper_clients)

        def go() -> None:
            for _ in range(each_has):
                keeper.leave(queue, soon=False)

        threads = [threading.Thread(target=go) for _ in range(amount)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

        def deadline() -> float:
            return float(counter.client.zscore(counter.keys.leases, me) or 0)

        # One is left.
        since = wait_until(deadline, 30)
        wait_until(lambda: deadline() > since + 1e6, 30, what="renewals for a second")
        keeper.leave(queue)
        wait_until(lambda: not counter.client.exists(counter.keys.leases), 30, what="the end of the lease")


def test_a_callback_that_takes_long_is_no_dead_connection(counter: Counter) -> None:
    with counter.connect(**QUICK) as connection:
        intake = watched(connection, 0.8)
        counter.publish(*range(20), connection=connection)
        served: list[Any] = []

        def serve(message: Any) -> None:
            if message.payload == 10:
                # Two looks of the watchdog and more.
                looks: list[float] = []
                intake._process.keeper.watch(looks.append)
                wait_until(lambda: len(looks) >= 8, 30)
                intake._process.keeper.unwatch(looks.append)
            served.append(message.payload)
            message.ack()

        consumer = connection.Consumer([kombu.Queue(counter.queue)], on_message=serve, accept=["json"])
        with consumer:
            counter.drain_until(connection, lambda: len(served) >= 20, 30)
            assert sorted(served) == list(range(20))
            counter.drain_until(connection, lambda: counter.depth() == 0, 30)
        assert intake._process.strikes == 0


def test_a_consumer_that_does_not_claim_beside_a_backlog_connects_anew(counter: Counter) -> None:
    with counter.connect(**QUICK) as connection:
        intake = watched(connection, 0.3)
        with counter.consuming(connection) as got:
            counter.publish(1)
            counter.drain(connection, got, 1, 30)
            got[0].ack()
            # As if an answer had been mislaid.
            intake.fetcher._claiming = True
            counter.publish(2)
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
    with counter.connect(**QUICK) as connection, counter.consuming(connection) as got:
        counter.drain(connection, got, 1, 30)
        assert bodies(got) == [2]
        got[0].ack()


@pytest.mark.parametrize("what", ["channel", "connection"])
def test_a_callback_may_close_what_it_was_called_from(counter: Counter, what: str) -> None:
    counter.publish(1, 2)
    with counter.connect(**QUICK) as connection:
        served: list[Any] = []

        def serve(message: Any) -> None:
            served.append(message.payload)
            message.ack()
            (message.channel if what == "channel" else connection).close()

        consumer = connection.Consumer([kombu.Queue(counter.queue)], on_message=serve, accept=["json"])
        consumer.consume()
        wait_until(lambda: (connection.drain_events(timeout=1), served)[1], 30)
        assert served == [1]
    wait_until(lambda: counter.depth() == 1, 30)
