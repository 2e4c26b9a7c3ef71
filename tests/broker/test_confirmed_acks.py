"""A program of plain kombu knows whether the broker has its acks, whatever else goes on in its process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import redis

from celery_dq.keys import PartitionKeys
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.consuming import consumer_thread, delivery
from celery_dq.transport.redis.consuming.consumer_threads import ConsumerThreads
from celery_dq.transport.redis.store.partition import Partition, Queue
from celery_dq.transport.redis.store.script_calls import load_scripts
from tests.broker.kombu_client import KombuClient
from tests.broker.proxy import Proxy

#: No heartbeat comes by itself before the end of the test.
LONG: dict[str, Any] = {"lease": "60s", "watchdog": 0}
OTHER = "another queue"


def ack_sha(kombu_client: KombuClient) -> bytes:
    return kombu_client.partition.ack("", settle=[], finish=[]).script.sha1.encode()


def test_a_flush_waits_for_acks_under_way(
    kombu_client: KombuClient, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ack that the consumer thread has taken is not pending any more, and not confirmed."""
    monkeypatch.setattr(delivery, "END_TIMEOUT_S", 0.05)
    kombu_client.publish(1)
    with kombu_client.connect(proxy.url(kombu_client.url), **LONG) as connection:
        channel = connection.default_channel
        message = channel.basic_get(kombu_client.queue)
        proxy.hold_answers_to, proxy.holds_left = ack_sha(kombu_client), 1
        with pytest.raises(redis.ConnectionError):
            message.ack()
        wait_until(lambda: proxy.held)
        assert not channel.consumer.flush()
        proxy.release_answers.set()
        monkeypatch.undo()
        assert channel.consumer.flush()
        assert kombu_client.depth() == 0


def test_a_message_without_ack_is_returned_before_its_end_is_confirmed(
    kombu_client: KombuClient, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker deletes it, so no other program would get it."""
    monkeypatch.setattr(delivery, "END_TIMEOUT_S", 0.05)
    kombu_client.publish(1)
    with kombu_client.connect(proxy.url(kombu_client.url), **LONG) as connection:
        proxy.hold_answers_to, proxy.holds_left = ack_sha(kombu_client), 1
        message = connection.default_channel.basic_get(kombu_client.queue, no_ack=True)
        proxy.release_answers.set()
        assert message.payload == 1
    wait_until(lambda: kombu_client.depth() == 0)


def test_an_ack_after_a_lost_connection_is_confirmed_over_the_next_one(
    kombu_client: KombuClient, proxy: Proxy
) -> None:
    kombu_client.publish(1, 2)
    with kombu_client.connect(proxy.url(kombu_client.url), **LONG) as connection:
        channel = connection.default_channel
        first, second = (channel.basic_get(kombu_client.queue) for _ in range(2))
        thread = channel.identity.threads.main
        proxy.cut_requests = kombu_client.partition.heartbeat("", lease_ms=1).script.sha1.encode()
        proxy.cuts_left = 2  # the thread tries a second time at once
        channel.identity.threads.renew_now()
        wait_until(lambda: not proxy.cuts_left and thread._has_lost)
        first.ack()
        second.requeue()
        assert channel.basic_get(kombu_client.queue).payload == 2


def test_an_ack_is_confirmed_beside_a_queue_that_refuses_acks(kombu_client: KombuClient) -> None:
    kombu_client.publish(1)
    with kombu_client.connect(**LONG) as connection:
        channel = connection.default_channel
        connection.SimpleQueue(OTHER, serializer="json").put(2)
        connection.SimpleQueue(OTHER, serializer="json").put(3)
        refused = channel.basic_get(kombu_client.queue)
        accepted = [channel.basic_get(OTHER) for _ in range(2)]
        state = kombu_client.keys.state
        kombu_client.client.rename(state, "kept")
        kombu_client.client.set(state, "of another program")
        with pytest.raises(redis.ConnectionError):
            refused.ack()
        for message in accepted:
            message.ack()  # while the acks of the first queue rest after the refusal
        kombu_client.client.rename("kept", state)
        wait_until(channel.consumer.flush)
        assert kombu_client.depth() == 0
    assert not kombu_client.client.hlen(PartitionKeys("online", OTHER).messages)


def new_threads(kombu_client: KombuClient) -> tuple[ConsumerThreads, Queue, Any]:
    process = ConsumerIdentity(600.0)
    process.threads = ConsumerThreads(process)
    keys = PartitionKeys("online", kombu_client.queue)
    clients = lambda: lambda: redis.Redis.from_url(kombu_client.url)  # noqa: E731 - as the channels pass it
    return process.threads, Queue(kombu_client.queue, Partition(keys, load_scripts())), clients


def test_a_consumer_begins_after_a_thread_that_could_not_start(
    kombu_client: KombuClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, queue, clients = new_threads(kombu_client)

    def refuse(run: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(consumer_thread, "start_thread", refuse)
    with pytest.raises(RuntimeError):
        threads.keep_lease(queue, clients)
    monkeypatch.undo()
    threads.keep_lease(queue, clients)
    wait_until(lambda: kombu_client.client.zcard(kombu_client.keys.leases))
    threads.drop_lease(queue)
    wait_until(lambda: not threads.queues)


def test_a_consumer_that_begins_at_the_exit_is_refused_and_delays_nothing(kombu_client: KombuClient) -> None:
    """The thread ends the leases then, under the lock that a new consumer takes."""
    threads, queue, clients = new_threads(kombu_client)
    threads.keep_lease(queue, clients)
    wait_until(lambda: kombu_client.client.zcard(kombu_client.keys.leases))
    main, late = threads.main, threading.Event()
    end_leases = main._end_leases

    def end() -> None:
        late.set()
        wait_until(lambda: not beginning.is_alive() or main.leases.lock.locked())
        end_leases()

    def begin() -> None:
        late.wait(30)
        with pytest.raises(redis.ConnectionError):
            threads.keep_lease(queue, clients)

    main._end_leases = end  # type: ignore[method-assign]
    beginning = threading.Thread(target=begin)
    beginning.start()
    threads.begin_exit()
    beginning.join(10)
    assert not beginning.is_alive()
    wait_until(lambda: not kombu_client.client.zcard(kombu_client.keys.leases))
