"""Plain kombu: no worker, no event loop."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any

import kombu

from celery_dq.testing.waiting import wait_until
from tests.broker.kombu_client import KombuClient, bodies, clients_of, consumer_of


def test_messages_lost_with_the_lease_are_not_delivered(kombu_client: KombuClient) -> None:
    kombu_client.publish(1, 2)
    with kombu_client.connect() as connection, kombu_client.consuming(connection, prefetch=2) as got:
        # One call claims both messages: one is delivered, the other waits in the inbox.
        kombu_client.drain(connection, got, 1)
        assert kombu_client.client.hlen(kombu_client.keys.held(consumer_of(connection))) == 2
        assert kombu_client.lose_lease() == 2
        for _ in range(2):  # one at a time, because both are suspects
            taken = kombu_client.partition.claim("other", lease_ms=60_000, want=9).run(kombu_client.client)
            assert len(taken.entries) == 1
        # A claim that arrives before the next heartbeat must not hide that the lease was lost.
        channel = got[0].channel
        claimed_at = channel.consumer.claims.claimed_at
        channel.qos.prefetch_count = 9
        kombu_client.look_again(connection)
        wait_until(lambda: channel.consumer.claims.claimed_at > claimed_at)
        begun = got.pop()
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=0.2)
        assert got == []
        # The late ack of the delivered message has no effect, and is counted.
        begun.ack()
        kombu_client.drain_until(connection, lambda: channel.in_flight.stale == 1)
    assert kombu_client.depth() == 2


def test_the_inbox_of_a_consumer_that_stops_draining_is_released(kombu_client: KombuClient) -> None:
    kombu_client.publish(*range(5))
    with (
        kombu_client.connect(lease="1s", watchdog=0, claim_ahead="10ms") as idle,
        kombu_client.consuming(idle, prefetch=5) as got,
    ):
        kombu_client.drain(idle, got, 1)
        with kombu_client.connect() as other, kombu_client.consuming(other, prefetch=5) as others:
            kombu_client.drain(other, others, 4)
            assert bodies(others) == [1, 2, 3, 4]
            for message in others:
                message.ack()
        got[0].ack()
    assert kombu_client.depth() == 0


def test_claimed_messages_of_a_loud_tenant_do_not_delay_a_quiet_one(kombu_client: KombuClient) -> None:
    kombu_client.publish(*range(8), tenant="loud")
    with kombu_client.connect() as connection, kombu_client.consuming(connection, prefetch=4) as got:
        # Three messages of the loud tenant wait in the inbox.
        kombu_client.drain(connection, got, 1)
        kombu_client.publish("quiet", tenant="quiet")
        got[0].ack()
        channel = got[0].channel
        wait_until(lambda: kombu_client.depth() == 8 and len(channel.in_flight) == 4)
        kombu_client.drain(connection, got, 5)
        assert "quiet" in bodies(got[1:3])
        assert [body for body in bodies(got) if body != "quiet"] == [0, 1, 2, 3]


def test_a_busy_consumer_claims_before_its_inbox_is_empty(kombu_client: KombuClient) -> None:
    kombu_client.publish(*range(300), tenant="loud")
    with kombu_client.connect() as connection, kombu_client.consuming(connection, prefetch=100) as got:
        for count in range(1, 101):
            kombu_client.drain(connection, got, count)
            got[-1].ack()
            if count == 5:
                kombu_client.publish("quiet", tenant="quiet")
            if got[-1].payload == "quiet":
                break
            time.sleep(0.02)  # stands for work that lasts longer than a claim, also on a busy machine
        assert len(got) < 90


def test_an_empty_queue_does_not_raise_the_service_time(kombu_client: KombuClient) -> None:
    with kombu_client.connect() as connection, kombu_client.consuming(connection) as got:
        consumer = connection.default_channel.consumer
        kombu_client.publish(1)
        kombu_client.drain(connection, got, 1)
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=0.5)
        kombu_client.publish(2)
        kombu_client.drain(connection, got, 2)
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=0.01)
        # If the wait counted, the mean would be half a second, or a third of that.
        assert consumer.pace.mean_s < 0.15


def test_acks_from_another_thread_while_the_first_one_waits(kombu_client: KombuClient) -> None:
    kombu_client.publish(1)
    with kombu_client.connect() as connection, kombu_client.consuming(connection, prefetch=2) as got:
        kombu_client.drain(connection, got, 1)
        waiting = threading.Thread(target=lambda: kombu_client.drain(connection, got, 2, 60))
        waiting.start()
        wait_until(lambda: connection.default_channel.consumer.is_asked)
        got[0].ack()
        wait_until(lambda: kombu_client.depth() == 0, 30)
        kombu_client.publish(2)
        waiting.join()
        got[1].ack()
    assert kombu_client.depth() == 0


def test_an_ack_after_the_close_still_arrives(kombu_client: KombuClient) -> None:
    kombu_client.publish(1)
    connection = kombu_client.connect()
    with kombu_client.consuming(connection, no_ack=True) as got:
        kombu_client.drain(connection, got, 1)
    connection.close()
    wait_until(lambda: kombu_client.depth() == 0)


def test_two_connections_in_one_process_share_fairly(kombu_client: KombuClient) -> None:
    kombu_client.publish(*range(20))
    with kombu_client.connect() as one, kombu_client.connect() as two:
        with (
            kombu_client.consuming(one, prefetch=1) as first,
            kombu_client.consuming(two, prefetch=1) as second,
        ):
            while len(first) + len(second) < 20:
                for connection, got in ((one, first), (two, second)):
                    try:
                        connection.drain_events(timeout=0.2)
                        got[-1].ack()
                    except TimeoutError:
                        pass
        assert sorted(bodies(first) + bodies(second)) == list(range(20))
        assert min(len(first), len(second)) >= 5
    assert kombu_client.depth() == 0


def test_a_clone_is_a_connection_of_its_own(kombu_client: KombuClient) -> None:
    with kombu_client.connect() as connection:
        kombu_client.publish(1, connection=connection)
        with connection.clone() as clone:
            kombu_client.publish(2, connection=clone)
            with kombu_client.consuming(clone) as got:
                kombu_client.drain(clone, got, 2)
                for message in got:
                    message.ack()
        kombu_client.publish(3, connection=connection)
        with kombu_client.consuming(connection) as got:
            kombu_client.drain(connection, got, 1)
            got[0].ack()
    assert kombu_client.depth() == 0


def test_drain_events_with_a_timeout_of_zero(kombu_client: KombuClient) -> None:
    kombu_client.publish(*range(3))
    with kombu_client.connect() as connection, kombu_client.consuming(connection) as got:

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
        assert time.monotonic() - before < 8


def test_after_a_drain_only_the_partitions_state_remains(kombu_client: KombuClient) -> None:
    with kombu_client.connect() as connection:
        for tenant in ("", "7", "ä ö", "a*b", "x" * 100):
            kombu_client.publish(1, 2, connection=connection, tenant=tenant, priority=3)
        with kombu_client.consuming(connection) as got:
            kombu_client.drain(connection, got, 10)
            for message in got:
                message.ack()
    assert kombu_client.depth() == 0
    wait_until(lambda: not kombu_client.client.exists(kombu_client.keys.leases), 30)
    left = kombu_client.leftovers()
    assert {key for key in left if not key.startswith("producer:")} <= {"state", "quotas", "finish_tags"}, (
        left
    )
    for key in kombu_client.client.scan_iter("*"):
        text = key.decode()
        assert text.startswith((kombu_client.keys.prefix, "_kombu.binding", "dq:online:queues")), text
    ttl = [kombu_client.client.pttl(key) for key in kombu_client.client.scan_iter("*producer:*")]
    assert all(0 < each <= 3_600_000 for each in ttl)


def test_get_takes_one_message(kombu_client: KombuClient) -> None:
    with kombu_client.connect(lease="1s", watchdog=0, claim_ahead="10ms") as connection:
        kombu_client.publish(1, 2, connection=connection)
        channel = connection.default_channel
        message = channel.basic_get(kombu_client.queue)
        assert json.loads(message.body) == 1
        assert kombu_client.client.hlen(kombu_client.keys.held(consumer_of(connection))) == 1
        message.ack()
        message = channel.basic_get(kombu_client.queue, no_ack=True)
        assert json.loads(message.body) == 2
        assert channel.basic_get(kombu_client.queue) is None
        assert kombu_client.depth() == 0
        wait_until(lambda: kombu_client.client.zcard(kombu_client.keys.leases) == 0)


def test_get_goes_past_cancelled_and_unreadable_messages(kombu_client: KombuClient) -> None:
    with kombu_client.connect(lease="1s", watchdog=0, claim_ahead="10ms") as connection:
        for task_id in ("a", "b", "c", "d"):
            kombu_client.publish(task_id, connection=connection, headers={"id": task_id})
        kombu_client.partition.cancel(["a", "b"]).run(kombu_client.client)
        kombu_client.client.hset(kombu_client.keys.messages, "c", b"not a record")
        message = connection.default_channel.basic_get(kombu_client.queue, no_ack=True)
        assert json.loads(message.body) == "d"
        assert connection.default_channel.basic_get(kombu_client.queue) is None
        wait_until(lambda: kombu_client.depth() == 0, 30)


def test_queues_of_other_environments_and_prefixes_are_apart(kombu_client: KombuClient) -> None:
    with (
        kombu_client.connect(environment="sandbox") as sandbox,
        kombu_client.connect(key_prefix="shop.") as shop,
    ):
        kombu_client.publish("sandbox", connection=sandbox)
        kombu_client.publish("shop", connection=shop)
        kombu_client.publish("online")
        for connection, expected in ((sandbox, "sandbox"), (shop, "shop")):
            with kombu_client.consuming(connection) as got:
                kombu_client.drain(connection, got, 1)
                assert bodies(got) == [expected]
                got[0].ack()
    assert kombu_client.depth() == 1


def test_a_cancel_leaves_no_message_in_flight(kombu_client: KombuClient) -> None:
    kombu_client.publish(1)
    with kombu_client.connect() as connection:
        with kombu_client.consuming(connection, prefetch=5):
            connection.default_channel.tick()
        assert kombu_client.client.hlen(kombu_client.keys.held(consumer_of(connection))) in (0, 1)
        wait_until(lambda: kombu_client.client.exists(kombu_client.keys.turn), 30)
        wait_until(lambda: not kombu_client.client.exists(kombu_client.keys.leases), 30)


def test_messages_of_a_dead_consumer_return_when_its_lease_ends(kombu_client: KombuClient) -> None:
    """The messages do not wait for the next heartbeat of another consumer, which here is 60 s away."""
    kombu_client.publish(1)
    assert kombu_client.partition.claim("dead", lease_ms=1_000, want=1).run(kombu_client.client).entries
    with kombu_client.connect(lease="240s") as connection, kombu_client.consuming(connection) as got:
        connection.transport.context.identity.threads.renew_now()
        kombu_client.drain(connection, got, 1)
        got[0].ack()


def test_getting_one_by_one_never_gets_a_message_twice(kombu_client: KombuClient) -> None:
    # The lease ends when no message is in flight, and begins again with the next one.
    kombu_client.publish(*range(300))
    with kombu_client.connect(lease="10s", watchdog=0, claim_ahead="10ms") as connection:
        heartbeat = connection.transport.context.identity.threads
        got = []
        while (message := connection.default_channel.basic_get(kombu_client.queue)) is not None:
            heartbeat.renew_now()
            got.append(json.loads(message.body))
            message.ack()
            heartbeat.renew_now()
        assert got == list(range(300))
    assert kombu_client.depth() == 0


def test_a_process_that_stood_still_takes_no_sound_connection_for_dead(kombu_client: KombuClient) -> None:
    with kombu_client.connect() as connection, kombu_client.consuming(connection, prefetch=5) as got:
        channel = connection.default_channel
        wakeups = channel.consumer.claims.wakeups
        kombu_client.drain_until(connection, lambda: wakeups.is_waiting)

        def stand_still() -> None:
            """Leave the state after a stop of minutes: the answer has arrived and is not read."""
            kombu_client.publish(1)
            wait_until(wakeups.groups[0].connection.has_unread_input)
            wakeups.groups[0].waiting_since -= 120

        assert channel.identity.threads.run_between_trips(stand_still, 30)
        kombu_client.drain(connection, got, 1)
        got[0].ack()
    assert kombu_client.depth() == 0


def test_consumers_of_one_transient_queue_lose_no_message(kombu_client: KombuClient) -> None:
    """The last consumer gets the messages, as in kombu's own transport; after its end, the one before it."""
    queue = kombu.Queue("replies", durable=False, auto_delete=True, routing_key="replies")
    got: list[tuple[str, Any]] = []

    def consumer(name: str) -> Any:
        return connection.Consumer([queue], callbacks=[lambda body, _: got.append((name, body))], no_ack=True)

    def waits() -> list[str]:
        return [each["id"] for each in clients_of(kombu_client.client) if each["cmd"] == "blpop"]

    with kombu_client.connect() as connection:
        first, last, publish = consumer("first"), consumer("last"), connection.Producer().publish
        first.consume()
        wait_until(waits)
        wait = waits()
        last.consume()
        publish(1, routing_key="replies")
        kombu_client.drain(connection, got, 1)
        last.cancel()
        publish(2, routing_key="replies")
        kombu_client.drain(connection, got, 2)
        assert got == [("last", 1), ("first", 2)]
        assert waits() == wait
        first.cancel()
        publish(3, routing_key="replies")
        last.consume()
        kombu_client.drain(connection, got, 3)
        assert got[2] == ("last", 3)
