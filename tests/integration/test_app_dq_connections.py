"""The connections of ``app.dq``, and its errors without one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from celery import Celery
from kombu.exceptions import OperationalError

import celery_dq
from celery_dq.errors import ConfigurationError
from celery_dq.testing.processes import dead_port
from celery_dq.testing.servers import RedisServer
from tests.integration.shop import send

# Connections.


@contextmanager
def app_on(broker: str, **conf: Any) -> Iterator[Any]:
    with Celery("other", broker=broker, set_as_current=False) as app:
        celery_dq.setup(app)
        app.conf.update(conf)
        yield app
        producers: Any = app.pool
        producers.force_close_all()


def test_a_broker_of_another_kind_is_an_error_that_reports_it(redis_url: str) -> None:
    with (
        app_on(redis_url) as app,
        pytest.raises(ConfigurationError, match="set broker_url to dq-redis://"),
    ):
        app.dq.queues["push"].snapshot()


def test_a_prefix_that_would_reach_only_some_keys_is_refused(broker_url: str) -> None:
    options = {"global_keyprefix": "shop:"}
    with (
        pytest.raises(ConfigurationError, match="dq_key_prefix"),
        app_on(broker_url, broker_transport_options=options) as app,
    ):
        app.send_task("notify", ("a",))


def test_a_unix_socket_and_its_database() -> None:
    with RedisServer(unix_socket=True) as server:
        url = server.url(3, scheme="dq-redis")
        with app_on(url) as app:
            app.send_task("notify", ("a",), queue="push")
            assert app.dq.queues["push"].depth == 1
        with redis.Redis.from_url(server.url(3)) as client:
            assert client.exists("dq:{online/push/0}:messages")


def test_a_dead_broker_is_an_error_within_seconds() -> None:
    with (
        dead_port() as port,
        app_on(f"dq-redis://127.0.0.1:{port}/0") as app,
        pytest.raises(OperationalError),
    ):
        app.dq.queues["push"].snapshot()


def test_a_wrong_setting_is_an_error_of_the_first_connection(broker_url: str) -> None:
    with (
        pytest.raises(ConfigurationError, match="did you mean 'dq_lease'"),
        app_on(broker_url, dq_leese=5) as app,
    ):
        app.send_task("notify")


def test_settings_may_come_after_setup_and_users_options_stay(broker_url: str) -> None:
    options = {"socket_timeout": 7}
    with app_on(broker_url, dq_environment="sandbox", broker_transport_options=options) as app:
        with app.connection_for_write() as connection:
            channel: Any = connection.default_channel
            assert channel.partition("push").keys.environment == "sandbox"
            assert (connection.transport_options or {})["socket_timeout"] == 7
        assert app.conf.broker_transport_options == {"socket_timeout": 7}


def test_threads_share_the_app_dq(shop: Any) -> None:
    send(shop, *range(4))
    counts: list[int] = []

    def look() -> None:
        counts.extend(shop.dq.queues["push"].depth for _ in range(10))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [4] * 80
