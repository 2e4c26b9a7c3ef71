"""A push whose answer is lost is sent again, and stores its messages once."""

from __future__ import annotations

from typing import Any

import kombu
import kombu.exceptions
import pytest

from celery_dq.transport.redis.store.publisher import BATCH_ATTEMPTS
from tests.broker.kombu_client import KombuClient
from tests.broker.proxy import Proxy

RETRY = {"max_retries": 5, "interval_start": 0, "interval_step": 0.01, "interval_max": 0.05}


def test_a_lost_answer_does_not_publish_twice(kombu_client: KombuClient, proxy: Proxy) -> None:
    with kombu_client.connect(proxy.url(kombu_client.url)) as connection:
        kombu_client.publish("first", connection=connection)
        proxy.drop_answers_to, proxy.drops_left = b"payload-17", 3
        kombu_client.publish("payload-17", connection=connection, retry=True, retry_policy=RETRY)
        assert proxy.dropped == 3
        kombu_client.publish("last", connection=connection, retry=True, retry_policy=RETRY)
        assert kombu_client.depth() == 3
    with kombu_client.connect() as connection, kombu_client.consuming(connection) as got:
        kombu_client.drain(connection, got, 3)
        assert [message.payload for message in got] == ["first", "payload-17", "last"]


def test_the_very_first_push_may_lose_its_answer(kombu_client: KombuClient, proxy: Proxy) -> None:
    with kombu_client.connect(proxy.url(kombu_client.url)) as connection:
        proxy.drop_answers_to, proxy.drops_left = b"payload-17", 1
        kombu_client.publish("payload-17", connection=connection, retry=True, retry_policy=RETRY)
    assert kombu_client.depth() == 1


def test_a_cut_before_the_request_arrives_publishes_once(kombu_client: KombuClient, proxy: Proxy) -> None:
    with kombu_client.connect(proxy.url(kombu_client.url)) as connection:
        kombu_client.publish("first", connection=connection)
        for n in range(5):
            proxy.cut_all()
            kombu_client.publish(n, connection=connection, retry=True, retry_policy=RETRY)
    assert kombu_client.depth() == 6


def message(channel: Any, body: str) -> dict[str, Any]:
    made: dict[str, Any] = channel.prepare_message(body, content_type="text/plain", content_encoding="utf-8")
    return made


def test_a_batch_that_was_not_answered_is_kept_for_the_next_flush(
    kombu_client: KombuClient, proxy: Proxy
) -> None:
    with kombu_client.connect(proxy.url(kombu_client.url)) as connection:
        channel = connection.default_channel
        kombu.Queue(kombu_client.queue)(channel).declare()
        batch = channel.create_publish_batch(10)
        for n in range(3):
            batch.publish(message(channel, f"payload-{n}"), exchange="", routing_key=kombu_client.queue)
        proxy.cut_requests, proxy.cuts_left = b"payload-0", BATCH_ATTEMPTS
        with pytest.raises(kombu.exceptions.OperationalError):
            batch.flush()
        assert kombu_client.depth() == 0
        batch.flush()
        assert kombu_client.depth() == 3


def test_a_batch_takes_messages_that_a_lost_channel_has_stamped(kombu_client: KombuClient) -> None:
    with kombu_client.connect() as connection:
        lost, channel = connection.channel(), connection.default_channel
        kombu.Queue(kombu_client.queue)(channel).declare()
        old = message(lost, "old")
        lost.publisher.stamp(kombu_client.queue, old)
        batch = channel.create_publish_batch(10)
        for each in (message(channel, "new"), old, message(channel, "newer")):
            batch.publish(each, exchange="", routing_key=kombu_client.queue)
        batch.flush()
    assert kombu_client.depth() == 3


if hasattr(kombu.Producer, "batch"):  # since kombu 5.7

    def test_a_batch_whose_answer_is_lost_is_there_once(kombu_client: KombuClient, proxy: Proxy) -> None:
        with kombu_client.connect(proxy.url(kombu_client.url)) as connection:
            producer = connection.Producer()
            kombu.Queue(kombu_client.queue)(connection.default_channel).declare()
            proxy.drop_answers_to, proxy.drops_left = b"payload-9", 1
            with producer.batch(max_size=10):
                for n in range(25):
                    producer.publish(
                        f"payload-{n}",
                        routing_key=kombu_client.queue,
                        serializer="json",
                        retry=True,
                        retry_policy=RETRY,
                    )
            assert proxy.dropped == 1
        with kombu_client.connect() as connection, kombu_client.consuming(connection) as got:
            stored = kombu_client.depth()
            kombu_client.drain(connection, got, stored)
            names = [message.payload for message in got]
            assert len(set(names)) == len(names)
            assert names == [f"payload-{n}" for n in range(25)]
