"""Reply queues leave no keys behind, and a count is the number of waiting messages."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from celery import Celery
from celery.contrib.testing.worker import start_worker

import celery_dq
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.store import transient
from celery_dq.transport.redis.store.transient import TransientQueues
from tests.integration.shop import send


def test_results_by_rpc_leave_no_queue_behind(broker_url: str, redis_url: str) -> None:
    with Celery("shop", broker=broker_url, backend="rpc://", set_as_current=False) as app:
        celery_dq.setup(app)
        app.conf.update(task_default_queue="push", broker_connection_retry_on_startup=True)

        @app.task(shared=False, name="echo")
        def echo(word: str) -> str:
            return word

        with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=20):
            assert echo.delay("hello").get(timeout=40) == "hello"
        abandoned = echo.delay("unread")
        with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=20):
            dq: Any = app
            wait_until(lambda: dq.dq.find(abandoned.id) == [], 40)
        with redis.Redis.from_url(redis_url) as client:
            partitions = [key for key in client.scan_iter("dq:{*") if b"/push/" not in key]
            assert partitions == []
            assert client.smembers("dq:online:queues") == {b"push"}
            replies = list(client.scan_iter("dq:online:transient*"))
            assert all(client.pttl(key) > 0 for key in replies)
        producers: Any = app.pool
        producers.force_close_all()


def test_a_cancelled_message_is_not_counted_as_waiting(shop: Any) -> None:
    first, _ = send(shop, "a", "b")
    shop.dq.queues["push"].cancel(first)
    with shop.connection_for_write() as connection:
        assert connection.default_channel.queue_declare("push", passive=True).message_count == 1


def test_of_the_reply_queues_of_others_only_the_last_are_remembered(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transient, "REMEMBERED", 3)
    asking, answering = TransientQueues("t:"), TransientQueues("t:")
    with redis.Redis.from_url(redis_url) as client:
        for number in range(10):
            asking.declare(client, f"reply-{number}", None)
            assert answering.exists(client, f"reply-{number}")
            answering.push(client, f"reply-{number}", {"number": number})
        assert [number for number in range(10) if answering.is_declared(f"reply-{number}")] == [7, 8, 9]
        assert all(asking.is_declared(f"reply-{number}") for number in range(10))
        assert answering.exists(client, "reply-0")
        answering.push(client, "reply-0", {"number": 0})
        assert asking.size(client, "reply-0") == 2
