"""Awaited calls and results on each kind of connection: by asyncio, or by a thread where there is none."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
from celery import Celery, signals, states
from kombu import pools

import celery_dq
from celery_dq.testing.redis_cluster import RedisCluster
from celery_dq.testing.servers import RedisServer, SentinelPair
from tests.apps import task
from tests.broker_variants.certificates import Authority
from tests.broker_variants.tls import TlsRedis, tls_redis

PASSWORD = "s3cret/@:?#%+"


@pytest.fixture(scope="module")
def authority(files: Path) -> Authority:
    return Authority(files / "awaited")


@pytest.fixture(scope="module")
def encrypted(authority: Authority) -> Iterator[TlsRedis]:
    with tls_redis(authority) as server:
        yield server


@pytest.fixture
def publishing_threads() -> Iterator[list[threading.Thread]]:
    """The threads in which messages are made."""
    threads: list[threading.Thread] = []

    def note(**_: Any) -> None:
        threads.append(threading.current_thread())

    signals.before_task_publish.connect(note)
    yield threads
    signals.before_task_publish.disconnect(note)
    pools.reset()


def app_of(url: str, **conf: Any) -> Any:
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(conf)
    return celery_dq.setup(app)


def call(app: Any, count: int = 6) -> list[str]:
    """Await some calls of a task, one after another; return their ids."""

    def notify(number: int) -> None: ...

    made = task(app, name="notify")(notify)

    async def calls() -> list[str]:
        return [(await made.adelay(number)).id for number in range(count)]

    return asyncio.run(calls())


def result_of(app: Any) -> Any:
    """Await a result that is stored after it is awaited."""

    async def wait() -> Any:
        awaited = asyncio.create_task(app.AsyncResult("awaited").aget(timeout=30))
        await asyncio.to_thread(app.backend.store_result, "awaited", 7, states.SUCCESS)
        return await awaited

    return asyncio.run(wait())


def test_an_encrypted_and_verified_connection_is_one_of_asyncio(
    encrypted: TlsRedis, authority: Authority, publishing_threads: list[threading.Thread]
) -> None:
    options = {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": str(authority.certificate)}
    place = f"localhost:{encrypted.port}/0"
    app = app_of(
        f"dq-rediss://{place}",
        broker_use_ssl=options,
        result_backend=f"rediss://{place}",
        redis_backend_use_ssl=options,
    )
    ids = call(app)
    assert publishing_threads[-1] is threading.main_thread()
    assert [each.id for each in app.dq.queues["celery"].peek()] == ids
    assert result_of(app) == 7
    app.close()


def test_a_server_with_a_certificate_of_a_stranger_is_refused(encrypted: TlsRedis, files: Path) -> None:
    options = {"ssl_cert_reqs": "required", "ssl_ca_certs": str(Authority(files / "stranger").certificate)}
    app = app_of(
        f"dq-rediss://localhost:{encrypted.port}/0", broker_use_ssl=options, task_publish_retry=False
    )
    with pytest.raises(Exception, match="(?i)certificate verify failed"):
        call(app)
    app.close()
    pools.reset()


def test_a_unix_socket_is_one_of_asyncio(publishing_threads: list[threading.Thread]) -> None:
    with RedisServer(unix_socket=True) as server:
        path = server.socket_path
        app = app_of(f"dq-redis+socket://{path}?virtual_host=3", result_backend=f"redis+socket://{path}")
        ids = call(app)
        assert publishing_threads[-1] is threading.main_thread()
        assert [each.id for each in app.dq.queues["celery"].peek()] == ids
        assert result_of(app) == 7
        app.close()
        pools.reset()


def test_a_named_user_logs_in(publishing_threads: list[threading.Thread]) -> None:
    with RedisServer() as server:
        with redis.Redis(port=server.port) as admin:
            admin.execute_command("ACL", "SETUSER", "shop", "on", f">{PASSWORD}", "~*", "&*", "+@all")
            admin.config_set("requirepass", "other")
        transport = {"client_name": "web"}
        place = f"shop:{quote(PASSWORD, safe='')}@127.0.0.1:{server.port}/2"
        app = app_of(f"dq-redis://{place}", broker_transport_options=transport)
        ids = call(app)
        assert publishing_threads[-1] is threading.main_thread()
        assert [each.id for each in app.dq.queues["celery"].peek()] == ids
        app.close()
        pools.reset()


def test_awaited_calls_follow_the_master_of_a_sentinel_group(
    publishing_threads: list[threading.Thread],
) -> None:
    with SentinelPair() as pair:
        app = app_of(
            pair.url(scheme="dq-sentinel"),
            broker_transport_options={"master_name": pair.name},
            result_backend=pair.url(),
            result_backend_transport_options={"master_name": pair.name},
            dq_publish_timeout="60s",
            task_publish_retry_policy={"max_retries": None, "interval_start": 0.1, "interval_step": 0.1},
        )

        def notify(number: int) -> None: ...

        made = task(app, name="notify")(notify)

        async def calls() -> list[str]:
            for number in range(6):
                await made.adelay(number)
            assert publishing_threads[-1] is threading.main_thread()
            await asyncio.to_thread(pair.fail_over)
            return [(await made.adelay(number)).id for number in range(6)]

        ids = asyncio.run(calls())
        stored = [each.id for each in app.dq.queues["celery"].peek(20)]
        assert stored[-6:] == ids
        assert result_of(app) == 7
        app.close()
        pools.reset()


@pytest.mark.parametrize("kind", ["cluster", "list"])
def test_a_thread_makes_the_calls_on_a_cluster_and_on_a_list_of_brokers(
    redis_cluster: RedisCluster,
    redis_server: RedisServer,
    publishing_threads: list[threading.Thread],
    kind: str,
) -> None:
    one = f"dq-redis://127.0.0.1:{redis_server.port}/14"
    app = app_of(redis_cluster.url() if kind == "cluster" else f"{one};dq-redis://127.0.0.1:1/0")
    ids = call(app)
    assert threading.main_thread() not in publishing_threads
    assert [each.id for each in app.dq.queues["celery"].peek()] == ids
    app.dq.queues["celery"].purge()
    app.close()
