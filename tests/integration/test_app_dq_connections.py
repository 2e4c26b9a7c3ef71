"""The connections of ``app.dq``, and its errors without one."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import redis
from celery import Celery
from kombu.exceptions import OperationalError

import celery_dq
from celery_dq.app.api.broker import OpenPartition
from celery_dq.errors import ConfigurationError
from celery_dq.testing.processes import dead_port
from celery_dq.testing.servers import RedisServer
from tests.integration.shop import send

# Connections.


def api_of(app: Any) -> Any:
    return app.dq


def test_a_broker_of_another_kind_is_an_error_that_reports_it(redis_url: str) -> None:
    with Celery("stock", broker=redis_url, set_as_current=False) as app:
        celery_dq.setup(app)
        with pytest.raises(ConfigurationError, match="set broker_url to dq-redis://"):
            api_of(app).queues["push"].snapshot()
        producers: Any = app.pool
        producers.force_close_all()


def test_a_prefix_that_would_reach_only_some_keys_is_refused(broker_url: str) -> None:
    with Celery("prefixed", broker=broker_url, set_as_current=False) as app:
        celery_dq.setup(app)
        app.conf.broker_transport_options = {"global_keyprefix": "shop:"}
        with pytest.raises(ConfigurationError, match="dq_key_prefix"):
            app.send_task("notify", ("a",))


def test_a_unix_socket_and_its_database() -> None:
    with RedisServer(unix_socket=True) as server:
        url = server.url(3, scheme="dq-redis")
        with Celery("local", broker=url, set_as_current=False) as app:
            celery_dq.setup(app)
            app.send_task("notify", ("a",), queue="push")
            assert api_of(app).queues["push"].depth == 1
            producers: Any = app.pool
            producers.force_close_all()
        with redis.Redis.from_url(server.url(3)) as client:
            assert client.exists("dq:{online/push/0}:messages")


def test_a_dead_broker_is_an_error_within_seconds() -> None:
    with (
        dead_port() as port,
        Celery("dead", broker=f"dq-redis://127.0.0.1:{port}/0", set_as_current=False) as app,
    ):
        celery_dq.setup(app)
        with pytest.raises(OperationalError):
            api_of(app).queues["push"].snapshot()


def test_a_wrong_setting_is_an_error_of_the_first_connection(broker_url: str) -> None:
    with Celery("wrong", broker=broker_url, set_as_current=False) as app:
        celery_dq.setup(app)
        app.conf.dq_leese = 5
        with pytest.raises(ConfigurationError, match="did you mean 'dq_lease'"):
            app.send_task("notify")


def test_settings_may_come_after_setup_and_users_options_stay(broker_url: str) -> None:
    with Celery("late", broker=broker_url, set_as_current=False) as app:
        celery_dq.setup(app)
        app.conf.update(dq_environment="sandbox", broker_transport_options={"socket_timeout": 7})
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


def test_a_lent_partition_is_a_plain_pair(shop: Any) -> None:
    with shop.dq._broker.open_home("push") as opened:
        assert isinstance(opened, OpenPartition)
        assert opened.partition.keys.queue == "push"
