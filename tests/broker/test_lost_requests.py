"""Requests that never arrive are sent again, and messages of claims in doubt are released."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import kombu
import pytest
import redis

from celery_dq.clock import ManualClock, SystemClock
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.in_flight import InFlightMessage, delivery_tag
from celery_dq.transport.redis.consumer_identity import InDoubtClaims
from tests.broker.kombu_client import KombuClient, bodies, consumer_of, heartbeat
from tests.broker.proxy import Proxy

#: No heartbeat comes by itself before the end of the test.
LONG: dict[str, Any] = {"lease": "60s", "watchdog": 0, "claim_ahead": "10ms"}


def sha(call: Any) -> bytes:
    return str(call.script.sha1).encode()


# -- trust in a lease counts from the sending of the request


def renew(kombu_client: KombuClient, connection: Any) -> None:
    connection.default_channel.identity.threads.renew_now()


def claim(kombu_client: KombuClient, connection: Any) -> None:
    kombu_client.look_again(connection)


def get(kombu_client: KombuClient, connection: Any) -> None:
    threading.Thread(target=lambda: connection.channel().basic_get(kombu_client.queue)).start()


@pytest.mark.parametrize(("ask", "script"), [(renew, "heartbeat"), (claim, "claim"), (get, "claim")])
def test_trust_in_a_lease_counts_from_the_sending(
    kombu_client: KombuClient,
    proxy: Proxy,
    ask: Callable[[KombuClient, Any], None],
    script: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = kombu_client.partition.scripts[script].sha1.encode()
    with (
        kombu_client.connect(proxy.url(kombu_client.url), **LONG) as connection,
        kombu_client.consuming(connection, 1),
    ):
        process, key = connection.default_channel.identity, kombu_client.keys.prefix
        kombu_client.drain_until(connection, lambda: process.in_flight.is_lease_trusted(key))
        heartbeat(process)
        process.clock = clock = ManualClock(monotonic=process.clock.monotonic())
        sent_at = clock.monotonic()
        proxy.hold_answers_to, proxy.holds_left = asked, 1
        ask(kombu_client, connection)
        wait_until(lambda: proxy.held)
        # All renewals are kept, because a request of a later time may follow the answer at once.
        renewals: list[tuple[str, float]] = []
        record = process.in_flight.record_renewal

        def keep(*renewal: Any) -> None:
            renewals.append(renewal)
            record(*renewal)

        monkeypatch.setattr(process.in_flight, "record_renewal", keep)
        clock.advance(4)
        proxy.release_answers.set()
        # The lease may begin when the request was sent, and not only when its answer was read.
        kombu_client.drain_until(connection, lambda: (key, sent_at) in renewals)


# -- dead letters


def test_a_dead_letter_that_did_not_arrive_is_sent_again(kombu_client: KombuClient, proxy: Proxy) -> None:
    letter = kombu_client.partition.dead_letter("", ("0", ""), reason="", worker="")
    kombu_client.publish(1)
    with kombu_client.connect(proxy.url(kombu_client.url), lease="2s", watchdog=0) as connection:
        with kombu_client.consuming(connection, prefetch=1) as got:
            kombu_client.drain(connection, got, 1)
            proxy.cut_requests, proxy.cuts_left = sha(letter), 1
            got[0].dead_letter("spoilt")
            with pytest.raises(connection.connection_errors):
                kombu_client.drain_until(connection, lambda: False)
            assert proxy.cut
        wait_until(lambda: kombu_client.client.hlen(kombu_client.keys.dead_info) == 1, what="the dead letter")
        assert kombu_client.client.exists(kombu_client.keys.held(consumer_of(connection))) == 0
    assert kombu_client.client.hlen(kombu_client.keys.dead) == 1


# -- claims in doubt


def test_the_message_of_a_claim_in_doubt_is_released_under_a_lasting_lease(
    kombu_client: KombuClient, proxy: Proxy
) -> None:
    claims = kombu_client.partition.claim("", lease_ms=1, want=1)
    with kombu_client.connect(proxy.url(kombu_client.url), **LONG) as connection:
        with kombu_client.consuming(connection, prefetch=5) as got:
            kombu_client.drain_until(connection, lambda: kombu_client.client.zcard(kombu_client.keys.leases))
            process, held = (
                connection.default_channel.identity,
                kombu_client.keys.held(consumer_of(connection)),
            )
            heartbeat(process)
            proxy.drop_answers_to, proxy.drops_left = sha(claims), 1
            kombu_client.publish(1)
            with pytest.raises(connection.connection_errors):
                kombu_client.drain(connection, got, 1)
            for _ in range(2):
                heartbeat(process)
            assert kombu_client.client.hlen(held) == 0
        with kombu_client.connect() as other, kombu_client.consuming(other) as got:
            assert bodies(kombu_client.drain(other, got, 1)) == [1]
            assert got[0].deliveries == 0
            got[0].ack()


def test_the_message_of_a_get_whose_answer_is_lost_is_released_under_a_lasting_lease(
    kombu_client: KombuClient, proxy: Proxy
) -> None:
    claims = kombu_client.partition.claim("", lease_ms=1, want=1)
    kombu_client.publish(1)
    with (
        kombu_client.connect(proxy.url(kombu_client.url), **LONG) as connection,
        kombu_client.consuming(connection, prefetch=1) as got,
    ):
        # The consumer has a message in flight, so the lease is renewed in any case.
        kombu_client.drain(connection, got, 1)
        process, held = connection.default_channel.identity, kombu_client.keys.held(consumer_of(connection))
        kombu_client.publish(2)
        proxy.drop_answers_to, proxy.drops_left = sha(claims), 1
        with pytest.raises(connection.connection_errors):
            connection.channel().basic_get(kombu_client.queue)
        assert kombu_client.client.hlen(held) == 2
        for _ in range(2):
            heartbeat(process)
        assert kombu_client.client.hkeys(held) == [got[0].message_id.encode()]
        message = connection.channel().basic_get(kombu_client.queue)
        assert (message.payload, message.deliveries) == (2, 0)
        message.ack()
        got[0].ack()


# -- releases, acknowledgements


@pytest.mark.parametrize("lost", ["request", "answer"])
@pytest.mark.parametrize("early", [True, False], ids=["settle", "finish"])
def test_an_acknowledgement_without_an_answer_is_sent_again(
    kombu_client: KombuClient, proxy: Proxy, early: bool, lost: str
) -> None:
    kombu_client.publish(1)
    with (
        kombu_client.connect(proxy.url(kombu_client.url), **LONG) as connection,
        kombu_client.consuming(connection, prefetch=1) as got,
    ):
        kombu_client.drain(connection, got, 1)
        in_flight, tag = connection.default_channel.identity.in_flight, got[0].delivery_tag
        held = in_flight.get(tag)
        if lost == "request":
            proxy.cut_requests, proxy.cuts_left = sha(kombu_client.partition.ack("")), 1
        else:
            proxy.drop_answers_to, proxy.drops_left = sha(kombu_client.partition.ack("")), 1
        (in_flight.settle if early else in_flight.finish)(tag)
        with pytest.raises(connection.connection_errors):
            kombu_client.drain_until(connection, lambda: False)
        assert proxy.cut + proxy.dropped == 1
        wait_until(lambda: held.confirmed, what="the answer to the second one")
        records = kombu_client.client.hvals(kombu_client.keys.messages)
        assert [each[:1] for each in records] == ([b"\0"] if early else [])
        in_flight.finish(tag)
    wait_until(lambda: kombu_client.depth() == 0)


def test_a_release_that_did_not_arrive_is_sent_again(kombu_client: KombuClient, proxy: Proxy) -> None:
    kombu_client.publish(1)
    with (
        kombu_client.connect(proxy.url(kombu_client.url), **LONG) as connection,
        kombu_client.consuming(connection, prefetch=1) as got,
    ):
        kombu_client.drain(connection, got, 1)
        process, held = connection.default_channel.identity, kombu_client.keys.held(consumer_of(connection))
        proxy.cut_requests, proxy.cuts_left = sha(kombu_client.partition.release("", [], mode="requeue")), 1
        process.in_flight.release(got[0].delivery_tag, "requeue")
        with pytest.raises(connection.connection_errors):
            kombu_client.drain_until(connection, lambda: False)
        assert proxy.cut
        # The consumer is open and keeps its lease, so the second heartbeat sends the release again.
        for _ in range(2):
            heartbeat(process)
        assert kombu_client.client.hlen(held) == 0
        assert kombu_client.depth() == 1


def test_a_lease_lasts_until_an_acknowledgement_is_answered(kombu_client: KombuClient, proxy: Proxy) -> None:
    kombu_client.publish(1)
    with kombu_client.connect(proxy.url(kombu_client.url), **LONG) as connection:
        channel = connection.default_channel
        message, held = channel.basic_get(kombu_client.queue), kombu_client.keys.held(consumer_of(connection))
        proxy.swallow, proxy.swallows_left = sha(kombu_client.partition.ack("")), 1
        errors: list[Exception] = []

        def acknowledge() -> None:
            try:
                message.ack()
            except redis.RedisError as exc:
                errors.append(exc)

        acknowledging = threading.Thread(target=acknowledge)
        acknowledging.start()
        wait_until(lambda: proxy.swallowed)
        # No consumer, in-flight message or pending ack is left, but Redis has not received the ack.
        assert kombu_client.client.hlen(held) == 1
        proxy.cut_all()
        acknowledging.join(30)
        assert len(errors) == 1
        wait_until(lambda: kombu_client.depth() == 0)


def test_an_exit_sends_pending_acks_and_ends_the_lease(kombu_client: KombuClient) -> None:
    kombu_client.publish(1)
    with kombu_client.connect(**LONG) as connection:
        channel = connection.default_channel
        message = channel.basic_get(kombu_client.queue)
        with connection.Consumer([kombu.Queue("another")]):
            channel.identity.in_flight.finish(message.delivery_tag)
            channel.identity.threads.main._end_at_exit()
            assert kombu_client.depth() == 0
            assert not kombu_client.client.exists(kombu_client.keys.leases)


def test_messages_of_a_claim_on_its_way_are_not_released() -> None:
    doubts = InDoubtClaims(SystemClock())
    tag = delivery_tag("p", "7", "m")
    doubts.claim_sent("p")
    doubts.claim_unanswered("p")
    doubts.claim_sent("p")  # the broker has carried it out, and its answer is still to be read
    for _ in range(3):
        assert doubts.find_unknown("p", {tag}, list) == []
    doubts.claim_answered("p", ["7"])
    for _ in range(3):
        assert doubts.find_unknown("p", {tag}, lambda: [InFlightMessage("p", "m", "7", tag)]) == []
    assert not doubts.needs_comparison("p")
