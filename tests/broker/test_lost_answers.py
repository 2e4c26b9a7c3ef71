"""Scripts that Redis has run, and whose answers are lost."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.broker.kombu_client import KombuClient, bodies
from tests.broker.proxy import Proxy


def publish_for_one_claim(kombu_client: KombuClient, connection: Any) -> None:
    """Publish two messages while the consumer thread stands, so that one claim brings both."""
    stands, may_go_on = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        assert may_go_on.wait(30)

    connection.default_channel.identity.threads.main.request(stand)
    assert stands.wait(30)
    kombu_client.publish(1, 2)
    may_go_on.set()


def test_a_new_connection_receives_the_messages_of_a_claim_whose_answer_is_lost(
    kombu_client: KombuClient, proxy: Proxy
) -> None:
    claim = kombu_client.partition.claim("", lease_ms=1, want=1).script.sha1.encode()
    connection = kombu_client.connect(proxy.url(kombu_client.url), lease="1s", watchdog=0, claim_ahead="10ms")
    with kombu_client.consuming(connection, prefetch=5) as got:
        kombu_client.drain_until(connection, lambda: kombu_client.client.zcard(kombu_client.keys.leases))
        proxy.drop_answers_to, proxy.drops_left = claim, 1
        publish_for_one_claim(kombu_client, connection)
        with pytest.raises(connection.connection_errors):
            kombu_client.drain(connection, got, 1)
        connection.collect()
        with kombu_client.consuming(connection, prefetch=5) as got:
            kombu_client.drain(connection, got, 2)
            assert bodies(got) == [1, 2]
            assert [message.deliveries for message in got] == [0, 0]
            for message in got:
                message.ack()
            kombu_client.drain_until(connection, lambda: kombu_client.depth() == 0)


@pytest.mark.logged_error("goes on after an error")
def test_claimed_messages_are_released_when_their_delivery_fails(kombu_client: KombuClient) -> None:
    connection = kombu_client.connect(lease="1s", watchdog=0, claim_ahead="10ms")
    with kombu_client.consuming(connection, prefetch=3) as got:
        consumer = connection.default_channel.consumer
        receive = consumer.receive

        def fail(subscription: Any, entry: Any, held: Any) -> None:
            consumer.receive = receive
            connection.transport.context.identity.in_flight._messages.pop(held.tag)
            raise RuntimeError("out of memory, perhaps")

        consumer.receive = fail
        kombu_client.publish(1, 2, 3)
        with pytest.raises(connection.connection_errors, match="out of memory"):
            kombu_client.drain(connection, got, 3, 30)
        connection.collect()
        # The process keeps its lease, so only it can release the messages.
        with kombu_client.consuming(connection, prefetch=3) as got:
            kombu_client.drain(connection, got, 3, 30)
            assert sorted(bodies(got)) == [1, 2, 3]
            for message in got:
                message.ack()
            kombu_client.drain_until(connection, lambda: kombu_client.depth() == 0, 30)
