"""The permits of claims that are cancelled, and of messages that a consumer was given."""

from __future__ import annotations

from celery_dq.testing.waiting import wait_until
from tests.broker.kombu_client import KombuClient
from tests.lua.partition_scripts import PartitionScripts


def test_a_cancelled_consumer_refunds_the_permit_of_its_claim_under_way(kombu_client: KombuClient) -> None:
    scripts = PartitionScripts(kombu_client.client, kombu_client.queue)
    scripts.set_quota("slow", rate=0.001)
    scripts.take(1)  # loads the script, so that the claim below is one command
    kombu_client.publish(1, 2, tenant="slow")
    first, second = scripts.waiting("slow")
    with kombu_client.connect() as connection:
        with kombu_client.consuming(connection, prefetch=1) as got:
            connection.default_channel.tick()
            # The claim has taken the only permit of a thousand seconds, and its answer is not read yet.
            wait_until(lambda: scripts.waiting("slow") == [second])
        assert got == []
        wait_until(lambda: scripts.waiting("slow") == [first, second])
        assert scripts.take(2) == [first]


def test_a_message_that_a_consumer_was_given_has_cost_its_permit(kombu_client: KombuClient) -> None:
    scripts = PartitionScripts(kombu_client.client, kombu_client.queue)
    scripts.set_quota("slow", rate=0.001)
    kombu_client.publish(1, tenant="slow")
    with kombu_client.connect() as connection, kombu_client.consuming(connection, prefetch=1) as got:
        kombu_client.drain(connection, got, 1)
        (waiting,) = (message.message_id for message in got)
    # The message was not acknowledged, so it returns when its connection closes. It may have begun.
    wait_until(lambda: scripts.waiting("slow") == [waiting])
    assert scripts.place("slow") == "throttled"
