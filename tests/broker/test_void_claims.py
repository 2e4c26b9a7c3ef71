"""A claim is void after the loss of its lease, wherever its answer is read."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from celery_dq.clock import ManualClock
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.in_flight import InFlightMessages
from tests.broker.kombu_client import KombuClient, consumer_of, heartbeat
from tests.broker.proxy import Proxy

#: No heartbeat comes by itself before the end of the test.
LONG: dict[str, Any] = {"lease": "60s", "watchdog": 0, "claim_ahead": "10ms"}


def test_a_claim_made_under_the_new_lease_is_not_void(kombu_client: KombuClient) -> None:
    with kombu_client.connect(**LONG) as connection, kombu_client.consuming(connection, prefetch=1) as got:
        kombu_client.drain_until(connection, lambda: kombu_client.client.zcard(kombu_client.keys.leases))
        process = connection.default_channel.identity
        kombu_client.lose_lease()
        heartbeat(process)
        kombu_client.publish(1)
        wait_until(lambda: kombu_client.client.hlen(kombu_client.keys.held(consumer_of(connection))) == 1)
        heartbeat(process)
        kombu_client.drain(connection, got, 1)
        assert [message.deliveries for message in got] == [0]
        got[0].ack()


@pytest.mark.parametrize("knows", [True, False])
def test_claims_that_an_older_copy_of_the_data_numbers_again_are_served(
    kombu_client: KombuClient, caplog: pytest.LogCaptureFixture, knows: bool
) -> None:
    with kombu_client.connect(**LONG) as connection, kombu_client.consuming(connection, prefetch=1) as got:
        kombu_client.drain_until(connection, lambda: kombu_client.client.zcard(kombu_client.keys.leases))
        process = connection.default_channel.identity
        kombu_client.client.hset(kombu_client.keys.state, "claim", 3)
        kombu_client.lose_lease()
        heartbeat(process)
        # The state of a restored older copy, in which the consumer has its lease.
        kombu_client.client.hset(kombu_client.keys.state, "claim", 1)
        if knows:
            heartbeat(process)
        kombu_client.publish(1)
        kombu_client.drain(connection, got, 1)
        assert [message.deliveries for message in got] == [0]
        got[0].ack()
        kombu_client.drain_until(connection, lambda: kombu_client.depth() == 0)
    # Until a heartbeat has noticed, such a claim counts as an old one; its message is released unstarted.
    if knows:
        assert "after its lease was lost" not in caplog.text


@pytest.mark.parametrize("finder", ["heartbeat", "another claim"])
def test_basic_get_whose_answer_comes_after_the_loss_claims_again(
    kombu_client: KombuClient, proxy: Proxy, finder: str
) -> None:
    claim = kombu_client.partition.claim("", lease_ms=1, want=1).script.sha1.encode()
    with kombu_client.connect(proxy.url(kombu_client.url), **LONG) as connection:
        channel = connection.default_channel
        kombu_client.publish(1)
        got: list[Any] = []
        proxy.hold_answers_to, proxy.holds_left = claim, 1
        asking = threading.Thread(target=lambda: got.append(channel.basic_get(kombu_client.queue)))
        asking.start()
        wait_until(lambda: proxy.held)
        heartbeat(channel.identity)  # the round with which the thread begins is over
        assert kombu_client.lose_lease() == 1
        (taken,) = (
            kombu_client.partition.claim("other", lease_ms=60_000, want=1).run(kombu_client.client).entries
        )
        if finder == "heartbeat":
            heartbeat(channel.identity)
        else:
            assert connection.channel().basic_get(kombu_client.queue) is None
        kombu_client.partition.release("other", [taken.tag], mode="requeue").run(kombu_client.client)
        proxy.release_answers.set()
        asking.join(30)
        assert [message.deliveries for message in got] == [1]
        got[0].ack()
    assert kombu_client.depth() == 0


def test_of_two_renewals_the_one_that_was_sent_last_reports_how_long_a_lease_is_trusted() -> None:
    clock = ManualClock()
    ledger = InFlightMessages(clock, lease_s=10.0)
    sent_at = clock.monotonic()
    ledger.record_renewal("p", sent_at)
    ledger.record_renewal("p", sent_at - 5)  # another thread reads its answer last
    clock.advance(5)
    assert ledger.is_lease_trusted("p")


def test_an_answer_that_is_read_late_makes_no_void_claim_valid() -> None:
    clock = ManualClock()
    ledger = InFlightMessages(clock, lease_s=10.0)
    early = clock.monotonic()
    clock.advance(1)
    ledger.lose_lease("p", frozenset(), 2, clock.monotonic())
    ledger.lose_lease("p", frozenset(), 0, early)  # another thread reads its answer last
    assert ledger.add("p", "message", "1") is None
    clock.advance(1)
    # A request of now finds a lower number where the broker has lost data.
    ledger.lose_lease("p", frozenset(), 0, clock.monotonic())
    assert ledger.add("p", "message", "1") is not None


def test_a_message_that_a_callback_of_plain_kombu_has_is_not_dropped_with_the_lease() -> None:
    ledger = InFlightMessages(ManualClock(), lease_s=10.0)
    for message_id in ("begun", "waiting"):
        held = ledger.add("p", message_id, "1")
        assert held is not None
        held.delivered = message_id == "begun"
    assert ledger.lose_lease("p", frozenset(), 1) == 1
    assert [held.id for held in ledger.messages_of("p")] == ["begun"]
