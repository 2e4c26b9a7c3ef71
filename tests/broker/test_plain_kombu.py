"""Plain kombu: no worker, no event loop."""

from __future__ import annotations

import contextlib
import json
import select
import threading
import time
from typing import Any

import pytest

from celery_dq.testing.waiting import wait_until
from tests.broker.counter import Counter, bodies, consumer_of


def test_what_was_lost_with_the_lease_is_not_delivered(counter: Counter) -> None:
    counter.publish(1, 2)
    with counter.connect() as connection, counter.consuming(connection, prefetch=2) as got:
        # Both are claimed by one call: one is delivered, the other lies in the inbox.
        counter.drain(connection, got, 1)
        assert counter.client.hlen(counter.keys.held(consumer_of(connection))) == 2
        assert counter.lose_lease() == 2
        for _ in range(2):  # one by one, because they may have killed their worker
            taken = counter.partition.claim("thief", lease_ms=60_000, want=9).run(counter.client)
            assert len(taken.entries) == 1
        # A claim that arrives before the next heartbeat must not hide that the lease was lost.
        channel = got[0].channel
        channel.intake.fetcher.wake()
        channel.qos.prefetch_count = 9
        channel.tick()
        wait_until(lambda: channel.intake.fetcher.teller.wire.readable())
        channel.intake.fetcher.on_readable(channel.intake.fetcher.teller.wire.fd)
        begun = got.pop()
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=0.2)
        assert got == []
        # The late acknowledgement of what had begun changes nothing, and is counted.
        begun.ack()
        counter.drain_until(connection, lambda: channel.ledger.stale == 1)
    assert counter.depth() == 2


def test_a_queue_that_stops_draining_gives_its_inbox_back(counter: Counter) -> None:
    counter.publish(*range(5))
    with (
        counter.connect(lease="1s", watchdog=0, claim_ahead="10ms") as idle,
        counter.consuming(idle, prefetch=5) as got,
    ):
        counter.drain(idle, got, 1)
        since = time.monotonic()
        with counter.connect() as other, counter.consuming(other, prefetch=5) as others:
            counter.drain(other, others, 4)
            assert bodies(others) == [1, 2, 3, 4]
            assert time.monotonic() - since < 3
            for message in others:
                message.ack()
        got[0].ack()
    assert counter.depth() == 0


def test_what_was_claimed_for_a_loud_tenant_does_not_go_before_a_quiet_one(counter: Counter) -> None:
    counter.publish(*range(8), tenant="loud")
    with counter.connect() as connection, counter.consuming(connection, prefetch=4) as got:
        # Three of the loud tenant lie in the inbox.
        counter.drain(connection, got, 1)
        counter.publish("quiet", tenant="quiet")
        got[0].ack()
        channel = got[0].channel
        channel.tick()
        wait_until(lambda: counter.client.hlen(counter.keys.held(consumer_of(connection))) == 4)
        wait_until(lambda: channel.intake.fetcher.teller.wire.readable())
        channel.intake.fetcher.on_readable(channel.intake.fetcher.teller.wire.fd)
        counter.drain(connection, got, 5)
        assert "quiet" in bodies(got[1:3])
        assert [body for body in bodies(got) if body != "quiet"] == [0, 1, 2, 3]


def test_a_busy_consumer_claims_before_all_is_worked_off(counter: Counter) -> None:
    counter.publish(*range(300), tenant="loud")
    with counter.connect() as connection, counter.consuming(connection, prefetch=100) as got:
        for count in range(1, 101):
            counter.drain(connection, got, count)
            got[-1].ack()
            if count == 5:
                counter.publish("quiet", tenant="quiet")
            if got[-1].payload == "quiet":
                break
            time.sleep(0.02)  # the work: what is left would last longer than a claim on a busy machine
        assert len(got) < 90


def test_to_wait_is_not_to_be_busy(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    came_at: list[float] = []
    kept_waiting_until: list[float] = []
    with counter.connect() as connection, counter.consuming(connection, prefetch=4) as got:
        channel = connection.default_channel
        clock, intake, fetcher = channel.process.clock, channel.intake, channel.intake.fetcher
        was_busy, deliver = intake.was_busy, fetcher._deliver

        def came(*args: Any) -> None:
            came_at.append(clock.monotonic())
            deliver(*args)

        def ask(since: float) -> bool:
            if intake.has_undelivered:
                kept_waiting_until.append(since)
            return bool(was_busy(since))

        monkeypatch.setattr(fetcher, "_deliver", came)
        monkeypatch.setattr(intake, "was_busy", ask)
        counter.publish(1)
        connection.drain_events(timeout=30)
        assert bodies(got) == [1]
        assert min(kept_waiting_until) >= came_at[0]


def test_silence_does_not_slow_a_consumer_down(counter: Counter) -> None:
    with counter.connect() as connection, counter.consuming(connection) as got:
        intake = connection.default_channel.intake
        counter.publish(1)
        counter.drain(connection, got, 1)
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=0.5)
        counter.publish(2)
        counter.drain(connection, got, 2)
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=0.01)
        # Half a second, or a third of it beside what was seen before, if it counted.
        assert intake._service_s < 0.15


def test_acks_from_other_threads(counter: Counter) -> None:
    counter.publish(*range(30))
    with counter.connect() as connection, counter.consuming(connection, prefetch=30) as got:
        counter.drain(connection, got, 30)
        threads = [threading.Thread(target=message.ack) for message in got]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counter.drain_until(connection, lambda: counter.depth() == 0)


def test_acks_from_another_thread_while_the_first_one_waits(counter: Counter) -> None:
    counter.publish(1)
    with counter.connect() as connection, counter.consuming(connection, prefetch=2) as got:
        counter.drain(connection, got, 1)
        waiting = threading.Thread(target=lambda: counter.drain(connection, got, 2, 60))
        waiting.start()
        wait_until(lambda: connection.transport.session.poller.driven)
        got[0].ack()
        wait_until(lambda: counter.depth() == 0, 30)
        counter.publish(2)
        waiting.join()
        got[1].ack()
    assert counter.depth() == 0


def test_close_tells_the_acks_that_are_pending(counter: Counter) -> None:
    counter.publish(*range(10))
    with counter.connect() as connection, counter.consuming(connection, prefetch=10) as got:
        counter.drain(connection, got, 10)
        for message in got[:7]:
            message.ack()
    # The three that were not acknowledged are back, without counting as a crash.
    assert counter.depth() == 3
    assert counter.client.hlen(counter.keys.running) == 0
    assert set(counter.client.hvals(counter.keys.deliveries)) <= {b"0"}
    with counter.connect() as connection, counter.consuming(connection) as got:
        counter.drain(connection, got, 3)
        assert bodies(got) == [7, 8, 9]


def test_an_ack_after_the_close_still_arrives(counter: Counter) -> None:
    counter.publish(1)
    connection = counter.connect()
    with counter.consuming(connection, no_ack=True) as got:
        counter.drain(connection, got, 1)
    connection.close()
    wait_until(lambda: counter.depth() == 0)


def test_two_connections_in_one_process_share_fairly(counter: Counter) -> None:
    counter.publish(*range(20))
    with counter.connect() as one, counter.connect() as two:
        with counter.consuming(one, prefetch=1) as first, counter.consuming(two, prefetch=1) as second:
            while len(first) + len(second) < 20:
                for connection, got in ((one, first), (two, second)):
                    try:
                        connection.drain_events(timeout=0.2)
                        got[-1].ack()
                    except TimeoutError:
                        pass
        assert sorted(bodies(first) + bodies(second)) == list(range(20))
        assert min(len(first), len(second)) >= 5
    assert counter.depth() == 0


def test_a_clone_is_a_connection_of_its_own(counter: Counter) -> None:
    with counter.connect() as connection:
        counter.publish(1, connection=connection)
        with connection.clone() as clone:
            counter.publish(2, connection=clone)
            with counter.consuming(clone) as got:
                counter.drain(clone, got, 2)
                for message in got:
                    message.ack()
        counter.publish(3, connection=connection)
        with counter.consuming(connection) as got:
            counter.drain(connection, got, 1)
            got[0].ack()
    assert counter.depth() == 0


def test_drain_events_without_patience(counter: Counter) -> None:
    counter.publish(*range(3))
    with counter.connect() as connection, counter.consuming(connection) as got:

        def turn() -> bool:
            with contextlib.suppress(TimeoutError):
                connection.drain_events(timeout=0)
            return len(got) == 3

        wait_until(turn, 30, interval_s=0)
        for message in got:
            message.ack()
        before = time.monotonic()
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=0)
        assert time.monotonic() - before < 1


def test_simple_queue(counter: Counter) -> None:
    with counter.connect() as connection:
        queue = connection.SimpleQueue(counter.queue)
        for n in range(5):
            queue.put({"n": n})
        assert queue.qsize() == 5
        first = queue.get(timeout=30)
        assert first.payload == {"n": 0}
        first.requeue()
        again = queue.get(timeout=30)
        assert again.payload == {"n": 0}
        again.ack()
        queue.close()
    with counter.connect() as connection:
        queue = connection.SimpleQueue(counter.queue)
        for n in range(1, 5):
            message = queue.get(timeout=30)
            assert message.payload == {"n": n}
            message.ack()
        queue.close()
    assert counter.depth() == 0


def test_after_a_drain_only_the_partitions_state_remains(counter: Counter) -> None:
    with counter.connect() as connection:
        for tenant in ("", "7", "ä ö", "a*b", "x" * 100):
            counter.publish(1, 2, connection=connection, tenant=tenant, priority=3)
        with counter.consuming(connection) as got:
            counter.drain(connection, got, 10)
            for message in got:
                message.ack()
    assert counter.depth() == 0
    wait_until(lambda: not counter.client.exists(counter.keys.leases), 30)
    left = counter.leftovers()
    assert {key for key in left if not key.startswith("producer:")} <= {"state", "quotas", "finish"}, left
    for key in counter.client.scan_iter("*"):
        text = key.decode()
        assert text.startswith((counter.keys.prefix, "_kombu.binding", "dq:online:queues")), text
    ttl = [counter.client.pttl(key) for key in counter.client.scan_iter("*producer:*")]
    assert all(0 < each <= 3_600_000 for each in ttl)


def test_get_takes_one_message(counter: Counter) -> None:
    with counter.connect(lease="1s", watchdog=0, claim_ahead="10ms") as connection:
        counter.publish(1, 2, connection=connection)
        channel = connection.default_channel
        message = channel.basic_get(counter.queue)
        assert json.loads(message.body) == 1
        assert counter.client.hlen(counter.keys.held(consumer_of(connection))) == 1
        message.ack()
        message = channel.basic_get(counter.queue, no_ack=True)
        assert json.loads(message.body) == 2
        assert channel.basic_get(counter.queue) is None
        assert counter.depth() == 0
        wait_until(lambda: counter.client.zcard(counter.keys.leases) == 0)


def test_get_goes_past_what_was_cancelled_or_cannot_be_read(counter: Counter) -> None:
    with counter.connect(lease="1s", watchdog=0, claim_ahead="10ms") as connection:
        for task_id in ("a", "b", "c", "d"):
            counter.publish(task_id, connection=connection, headers={"id": task_id})
        counter.partition.cancel(["a", "b"]).run(counter.client)
        counter.client.hset(counter.keys.messages, "c", b"not a record")
        message = connection.default_channel.basic_get(counter.queue, no_ack=True)
        assert json.loads(message.body) == "d"
        assert connection.default_channel.basic_get(counter.queue) is None
        wait_until(lambda: counter.depth() == 0, 30)


def test_queues_of_other_environments_and_prefixes_are_apart(counter: Counter) -> None:
    with counter.connect(environment="sandbox") as sandbox, counter.connect(key_prefix="shop.") as shop:
        counter.publish("sandbox", connection=sandbox)
        counter.publish("shop", connection=shop)
        counter.publish("online")
        for connection, expected in ((sandbox, "sandbox"), (shop, "shop")):
            with counter.consuming(connection) as got:
                counter.drain(connection, got, 1)
                assert bodies(got) == [expected]
                got[0].ack()
    assert counter.depth() == 1


def test_a_cancel_leaves_nothing_on_its_way(counter: Counter) -> None:
    counter.publish(1)
    with counter.connect() as connection:
        with counter.consuming(connection, prefetch=5):
            connection.default_channel.tick()
        assert counter.client.hlen(counter.keys.held(consumer_of(connection))) in (0, 1)
        wait_until(lambda: counter.client.exists(counter.keys.turn), 30)
        wait_until(lambda: not counter.client.exists(counter.keys.leases), 30)


def test_what_a_dead_consumer_held_comes_back_when_its_lease_ends(counter: Counter) -> None:
    """Not at the next heartbeat of somebody else, which here is 60 s away."""
    counter.publish(1)
    assert counter.partition.claim("dead", lease_ms=1_000, want=1).run(counter.client).entries
    with counter.connect(lease="240s") as connection, counter.consuming(connection) as got:
        connection.transport.session.process.keeper.ring()
        counter.drain(connection, got, 1)
        got[0].ack()


def test_getting_one_by_one_never_gets_a_message_twice(counter: Counter) -> None:
    # The lease ends whenever nothing is held, and begins again with the next message.
    counter.publish(*range(300))
    with counter.connect(lease="1s", watchdog=0, claim_ahead="10ms") as connection:
        keeper = connection.transport.session.process.keeper
        got = []
        while (message := connection.default_channel.basic_get(counter.queue)) is not None:
            keeper.ring()
            got.append(json.loads(message.body))
            message.ack()
            keeper.ring()
        assert got == list(range(300))
    assert counter.depth() == 0


def test_a_consumer_that_was_busy_for_long_takes_no_sound_connection_for_dead(counter: Counter) -> None:
    with counter.connect() as connection, counter.consuming(connection, prefetch=5) as got:
        fetcher = connection.default_channel.intake.fetcher
        counter.drain_until(connection, lambda: fetcher.tokens.waits)
        # As if all this had been sent before a callback that took minutes: the answers lie there.
        counter.publish(1)
        wait_until(lambda: select.select([fetcher.tokens.wire.fd], [], [], 0)[0])
        fetcher.tokens.since -= 120
        counter.drain(connection, got, 1)
        fetcher.wake()
        connection.default_channel.tick()
        wait_until(lambda: select.select([fetcher.teller.wire.fd], [], [], 0)[0])
        fetcher.teller._sent[0].sent_at -= 120
        counter.publish(2)
        counter.drain(connection, got, 2)
        for message in got:
            message.ack()
    assert counter.depth() == 0


def test_priorities_are_strict_or_age(counter: Counter) -> None:
    def order(**options: Any) -> list[Any]:
        with counter.connect(**options) as connection:
            for n, priority in enumerate((0, 9, 5, 0, 9)):
                counter.publish(f"{priority}-{n}", connection=connection, priority=priority)
            with counter.consuming(connection, prefetch=1) as got:
                for n in range(1, 6):
                    counter.drain(connection, got, n)
                    got[-1].ack()
                counter.drain_until(connection, lambda: counter.depth() == 0)
            return bodies(got)

    assert order() == ["9-1", "9-4", "5-2", "0-0", "0-3"]
    assert order(priority_aging="1h") == ["9-1", "9-4", "5-2", "0-0", "0-3"]
