"""A push whose answer is lost is sent again, and changes nothing."""

from __future__ import annotations

import kombu

from tests.broker.counter import Counter
from tests.broker.proxy import Proxy

RETRY = {"max_retries": 5, "interval_start": 0, "interval_step": 0.01, "interval_max": 0.05}


def test_a_lost_answer_does_not_publish_twice(counter: Counter, proxy: Proxy) -> None:
    with counter.connect(proxy.url(counter.url)) as connection:
        counter.publish("first", connection=connection)
        proxy.drop_answers_to, proxy.drops_left = b"payload-17", 3
        counter.publish("payload-17", connection=connection, retry=True, retry_policy=RETRY)
        assert proxy.dropped == 3
        counter.publish("last", connection=connection, retry=True, retry_policy=RETRY)
        assert counter.depth() == 3
    with counter.connect() as connection, counter.consuming(connection) as got:
        counter.drain(connection, got, 3)
        assert [message.payload for message in got] == ["first", "payload-17", "last"]


def test_the_very_first_push_may_lose_its_answer(counter: Counter, proxy: Proxy) -> None:
    with counter.connect(proxy.url(counter.url)) as connection:
        proxy.drop_answers_to, proxy.drops_left = b"payload-17", 1
        counter.publish("payload-17", connection=connection, retry=True, retry_policy=RETRY)
    assert counter.depth() == 1


def test_a_cut_before_the_request_arrives_publishes_once(counter: Counter, proxy: Proxy) -> None:
    with counter.connect(proxy.url(counter.url)) as connection:
        counter.publish("first", connection=connection)
        for n in range(5):
            proxy.cut_all()
            counter.publish(n, connection=connection, retry=True, retry_policy=RETRY)
    assert counter.depth() == 6


if hasattr(kombu.Producer, "batch"):  # since kombu 5.7

    def test_a_batch_whose_answer_is_lost_is_there_once(counter: Counter, proxy: Proxy) -> None:
        with counter.connect(proxy.url(counter.url)) as connection:
            producer = connection.Producer()
            kombu.Queue(counter.queue)(connection.default_channel).declare()
            proxy.drop_answers_to, proxy.drops_left = b"payload-9", 1
            with producer.batch(max_size=10):
                for n in range(25):
                    producer.publish(
                        f"payload-{n}",
                        routing_key=counter.queue,
                        serializer="json",
                        retry=True,
                        retry_policy=RETRY,
                    )
            assert proxy.dropped == 1
        with counter.connect() as connection, counter.consuming(connection) as got:
            stored = counter.depth()
            counter.drain(connection, got, stored)
            names = [message.payload for message in got]
            assert len(set(names)) == len(names)
            assert names == [f"payload-{n}" for n in range(25)]
