"""The broker on every server of this machine, old and new."""

from __future__ import annotations

import pytest

from celery_dq.testing.servers import RedisServer, wait_until
from tests.broker_variants.conftest import OpenCeleryApp, run_tasks


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_a_worker_runs_tasks(open_celery_app: OpenCeleryApp, server_binary: str, pool: str) -> None:
    with RedisServer(binary=server_binary) as server:
        run_tasks(open_celery_app(server.url(scheme="dq-redis")), pool)


def test_a_worker_goes_on_after_a_restart_and_without_its_scripts(
    open_celery_app: OpenCeleryApp, server_binary: str
) -> None:
    with RedisServer(binary=server_binary, appendonly=True) as server:
        place = open_celery_app(server.url(scheme="dq-redis"), dq_lease=5)
        with place.worker("prefork") as worker:
            assert place.send("add", 1, 1).get(timeout=30) == 2
            server.ask("SCRIPT", "FLUSH")
            assert place.send("add", 2, 2).get(timeout=30) == 4
            server.restart()
            assert place.send("add", 3, 3).get(timeout=30) == 6
            assert worker.alive


def test_a_full_server_refuses_and_recovers(open_celery_app: OpenCeleryApp, server_binary: str) -> None:
    with RedisServer(binary=server_binary) as server:
        place = open_celery_app(server.url(scheme="dq-redis"))
        with place.worker("threads") as worker:
            assert place.send("add", 1, 1).get(timeout=30) == 2
            server.ask("CONFIG", "SET", "maxmemory", "1mb")
            with pytest.raises(Exception, match="(?i)OOM|memory"):
                place.send("add", 1, 1, retry=False)
            server.ask("CONFIG", "SET", "maxmemory", "0")
            assert wait_until(lambda: place.send("add", 2, 2).get(timeout=30), 30) == 4
            assert worker.alive
