"""The broker was away for longer than a lease, or a connection died silently: who lives loses nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import kombu
import pytest

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.broker.counter import Counter, consumer_of
from tests.broker.proxy import Proxy


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def counter(server: RedisServer, proxy: Proxy) -> Iterator[Counter]:
    counter = Counter(server.url())
    yield counter
    counter.close()
    # Not before its keepers are done.
    wait_until(lambda: not server.ask("EXISTS", counter.keys.leases), 60, what="the end of the leases")


def take_one(counter: Counter, connection: Any) -> str:
    """Have a consumer take a message; returns its name."""
    counter.publish("work", connection=connection)
    got: list[Any] = []
    queues = [kombu.Queue(counter.queue)]
    consumer = connection.Consumer(queues, on_message=got.append, prefetch_count=1, accept=["json"])
    consumer.consume()
    counter.drain(connection, got, 1, 30)
    return consumer_of(connection)


def deadline(counter: Counter, consumer: str) -> float:
    found = counter.client.zscore(counter.keys.leases, consumer)
    return float(found or 0)


def renewed(counter: Counter, consumer: str) -> None:
    """Wait for a renewal of this lease."""
    before = deadline(counter, consumer)
    wait_until(lambda: deadline(counter, consumer) > before, 60, what="a renewal")


@pytest.mark.parametrize("outage", ["frozen", "restarted"])
def test_after_an_outage_nobody_takes_from_another_who_comes_back_too(
    counter: Counter, server: RedisServer, outage: str
) -> None:
    consumers = [take_one(counter, counter.connect(lease="1500ms", watchdog=0)) for _ in range(3)]
    for each in consumers:
        renewed(counter, each)
    counter.publish("of one who does not come back")
    (lost,) = counter.partition.claim("dead", lease_ms=1500, want=1).run(counter.client).entries
    over = max(deadline(counter, each) for each in (*consumers, "dead")) / 1e6
    if outage == "frozen":
        server.pause()
    else:
        server.kill()
    # The server's clock is ours.
    wait_until(lambda: time.time() > over, 60)
    if outage == "frozen":
        server.resume()
    else:
        server.start()
    # They do take back what nobody comes back for, but not before the others had time to.
    wait_until(lambda: not counter.client.exists(counter.keys.held("dead")), 60, what="the lost message")
    assert counter.client.hgetall(counter.keys.deliveries) == {lost.id.encode(): b"1"}
    assert [counter.client.hlen(counter.keys.held(each)) for each in consumers] == [1, 1, 1]


def test_a_connection_that_dies_silently_does_not_cost_the_lease(counter: Counter, proxy: Proxy) -> None:
    renewal = counter.partition.renew("", lease_ms=1).script.sha1.encode()
    holder = take_one(counter, counter.connect(proxy.url(counter.url), lease="5s", watchdog=0))
    other = take_one(counter, counter.connect(lease="5s", watchdog=0))
    proxy.swallow, proxy.swallows_left = renewal, 1
    wait_until(lambda: proxy.swallowed, 60)
    renewed(counter, holder)
    assert counter.client.hgetall(counter.keys.deliveries) == {}
    assert [counter.client.hlen(counter.keys.held(each)) for each in (holder, other)] == [1, 1]
