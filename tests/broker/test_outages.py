"""Live consumers lose no message by an outage longer than a lease, or by a connection that dies silently."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import kombu
import pytest

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.broker.kombu_client import KombuClient, consumer_of
from tests.broker.proxy import Proxy


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def kombu_client(server: RedisServer, proxy: Proxy) -> Iterator[KombuClient]:
    kombu_client = KombuClient(server.url())
    yield kombu_client
    kombu_client.close()
    # The server stops only after all heartbeat threads have ended.
    wait_until(lambda: not server.ask("EXISTS", kombu_client.keys.leases), 60, what="the end of the leases")


def take_one(kombu_client: KombuClient, connection: Any) -> str:
    """Let a consumer take a message; return the name of the consumer."""
    kombu_client.publish("work", connection=connection)
    got: list[Any] = []
    queues = [kombu.Queue(kombu_client.queue)]
    consumer = connection.Consumer(queues, on_message=got.append, prefetch_count=1, accept=["json"])
    consumer.consume()
    kombu_client.drain(connection, got, 1, 30)
    return consumer_of(connection)


def deadline(kombu_client: KombuClient, consumer: str) -> float:
    found = kombu_client.client.zscore(kombu_client.keys.leases, consumer)
    return float(found or 0)


def renewed(kombu_client: KombuClient, consumer: str) -> None:
    """Wait for a renewal of this lease."""
    before = deadline(kombu_client, consumer)
    wait_until(lambda: deadline(kombu_client, consumer) > before, 60, what="a renewal")


@pytest.mark.parametrize("outage", ["frozen", "restarted"])
def test_after_an_outage_consumers_that_return_keep_their_messages(
    kombu_client: KombuClient, server: RedisServer, outage: str
) -> None:
    consumers = [take_one(kombu_client, kombu_client.connect(lease="1500ms", watchdog=0)) for _ in range(3)]
    for each in consumers:
        renewed(kombu_client, each)
    kombu_client.publish("of one who does not come back")
    (lost,) = kombu_client.partition.claim("dead", lease_ms=1500, want=1).run(kombu_client.client).entries
    over = max(deadline(kombu_client, each) for each in (*consumers, "dead")) / 1e6
    if outage == "frozen":
        server.pause()
    else:
        server.kill()
    # Server and test have the same clock.
    wait_until(lambda: time.time() > over, 60)
    if outage == "frozen":
        server.resume()
    else:
        server.start()
    # Messages of a consumer that stays away are reaped, after the others had time to renew their leases.
    wait_until(
        lambda: not kombu_client.client.exists(kombu_client.keys.held("dead")), 60, what="the lost message"
    )
    assert kombu_client.client.hgetall(kombu_client.keys.deliveries) == {lost.id.encode(): b"1"}
    assert [kombu_client.client.hlen(kombu_client.keys.held(each)) for each in consumers] == [1, 1, 1]


def test_a_connection_that_dies_silently_does_not_cost_the_lease(
    kombu_client: KombuClient, proxy: Proxy
) -> None:
    renewal = kombu_client.partition.heartbeat("", lease_ms=1).script.sha1.encode()
    holder = take_one(kombu_client, kombu_client.connect(proxy.url(kombu_client.url), lease="5s", watchdog=0))
    other = take_one(kombu_client, kombu_client.connect(lease="5s", watchdog=0))
    proxy.swallow, proxy.swallows_left = renewal, 1
    wait_until(lambda: proxy.swallowed, 60)
    renewed(kombu_client, holder)
    assert kombu_client.client.hgetall(kombu_client.keys.deliveries) == {}
    assert [kombu_client.client.hlen(kombu_client.keys.held(each)) for each in (holder, other)] == [1, 1]
