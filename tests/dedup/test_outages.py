"""The Redis that keeps the dedup locks stops answering, on brokers that give no verdicts."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from functools import partial

import pytest
import redis

from celery_dq.dedup.machine import Verdict
from celery_dq.testing import waiting
from celery_dq.testing.servers import RedisServer
from tests.dedup.conftest import redis_coordinator
from tests.dedup.worker import Shop

wait_until = partial(waiting.wait_until, timeout_s=60)

CALLS = 30

#: Settings with which Redis refuses all writes, and those with which it accepts them.
REFUSALS = {"full": ("maxmemory", 1, 0), "no replicas": ("min-replicas-to-write", 1, 0)}


def refuse(server: RedisServer, how: str) -> None:
    name, refuses, _ = REFUSALS[how]
    with redis.Redis.from_url(server.url()) as client:
        client.config_set(name, refuses)


def accept(server: RedisServer, how: str) -> None:
    name, _, accepts = REFUSALS[how]
    with redis.Redis.from_url(server.url()) as client:
        client.config_set(name, accepts)


@pytest.fixture(scope="module")
def claims_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["redis", "amqp", "quorum"])
def shop(request: pytest.FixtureRequest, redis_url: str, claims_server: RedisServer) -> Iterator[Shop]:
    url = redis_url if request.param == "redis" else request.getfixturevalue("rabbitmq_server").url()
    # RabbitMQ never changes the prefetch of the consumer of such a queue.
    quorum = {"task_default_queue_type": "quorum"} if request.param == "quorum" else {}
    shop = Shop(
        url,
        redis_url,
        dq_lease=6,
        dq_dedup_url=claims_server.url(),
        worker_prefetch_multiplier=1,
        task_default_queue=f"cache-{uuid.uuid4().hex}",
        **quorum,
    )
    yield shop
    with shop.app.connection_for_write() as connection:
        connection.default_channel.queue_delete(shop.queue)
    shop.close()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The log records of the worker at shown levels, with their tracebacks, one line each."""
    formatter = logging.Formatter()
    # The heartbeats of earlier tests of this process, whose Redis has stopped, log for up to eight leases.
    records = [
        each
        for each in caplog.records
        if each.name.startswith(("celery_dq.worker", "celery_dq.other_brokers"))
    ]
    shown = [formatter.format(each) for each in records if each.levelno >= logging.WARNING]
    return [line for text in shown for line in text.splitlines()]


@pytest.mark.parametrize("how", ["killed", "hung"])
def test_calls_wait_outside_the_prefetch_and_go_on(
    how: str, shop: Shop, claims_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    refresh, note = shop.task("refresh"), shop.task("note")
    with redis.Redis.from_url(claims_server.url()) as client, shop.working(concurrency=2):
        # By now the worker's connections are open, and its scripts are loaded.
        shop.open(0)
        assert refresh.delay(0).get(timeout=40) == [0, 0]
        wait_until(lambda: not client.keys("*lock:*"))
        claims_server.kill() if how == "killed" else claims_server.pause()
        results = [refresh.delay(sku) for sku in range(1, CALLS)]
        duplicate = refresh.delay(1)
        assert note.delay("plain").get(timeout=60) == "plain"
        wait_until(lambda: lines(caplog))
        assert note.delay("another").get(timeout=60) == "another"
        assert shop.ran() == [0, "plain", "another"]
        claims_server.restart() if how == "killed" else claims_server.resume()
        for sku in range(1, CALLS):
            shop.open(sku, 2)
        assert [each.get(timeout=60) for each in results] == [[sku, 0] for sku in range(1, CALLS)]
        assert duplicate.get(timeout=60) == [1, 0]
    assert shop.overlaps == []
    shown = lines(caplog)
    assert len(shown) == 2, shown
    begun, over = shown
    assert "gets no answer" in begun
    assert "wait outside the prefetch" in begun
    assert "gets answers" in over


@pytest.mark.parametrize("shop", ["redis"], indirect=True)
@pytest.mark.parametrize("how", ["known", "hung", "full", "no replicas"])
def test_a_run_that_ends_during_an_outage_gives_its_key_back_after_it(
    how: str,
    shop: Shop,
    claims_server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    verdicts: list[Verdict],
) -> None:
    refresh = shop.task("refresh")
    with shop.working(concurrency=2):
        first = refresh.delay(1, version=1)
        wait_until(lambda: shop.runs)
        second = refresh.delay(1, version=2)
        third = refresh.delay(1, version=3)
        wait_until(lambda: len(verdicts) == 3)
        if how in REFUSALS:
            refuse(claims_server, how)
        else:
            claims_server.pause()
        if how == "known":
            wait_until(lambda: lines(caplog))
        shop.open(1)
        assert first.get(timeout=40) == [1, 1]
        wait_until(lambda: lines(caplog))
        if how in REFUSALS:
            accept(claims_server, how)
        else:
            claims_server.resume()
        with redis.Redis.from_url(claims_server.url()) as client:
            wait_until(lambda: "gets answers" in caplog.text)
            # The end of the run has released the lock, not the end of its lease.
            now = redis_coordinator(client).inspect(f"{shop.queue}|refresh(sku=1)")
            assert now is not None
            assert now.head is not None
            assert now.head.call.partition("/")[0] == second.id
        shop.open(1)
        assert second.get(timeout=40) == third.get(timeout=40) == [1, 2]
    assert shop.ran() == [1, 2]
    assert shop.overlaps == []
    assert len(lines(caplog)) == 2


@pytest.mark.parametrize("shop", ["redis"], indirect=True)
@pytest.mark.parametrize("how", REFUSALS)
def test_calls_wait_while_redis_answers_and_refuses_writes(
    how: str, shop: Shop, claims_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    refresh, note = shop.task("refresh"), shop.task("note")
    with redis.Redis.from_url(claims_server.url()) as client, shop.working(concurrency=2):
        refuse(claims_server, how)
        client.config_resetstat()
        shop.open(1)
        first = refresh.delay(1)
        # It is requested again after each heartbeat, a ping, which Redis answers.
        wait_until(lambda: client.info("commandstats").get("cmdstat_ping", {}).get("calls", 0) > 1)
        assert note.delay("plain").get(timeout=60) == "plain"
        accept(claims_server, how)
        assert first.get(timeout=60) == [1, 0]
    shown = lines(caplog)
    assert len(shown) == 2, shown
    assert "gets no answer" in shown[0]
    assert "gets answers" in shown[1]
