"""``dq-sentinel://``: workers and publishers continue after a change of the master."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kombu.exceptions import OperationalError

from celery_dq.errors import ConfigurationError
from celery_dq.testing.servers import RedisServer, SentinelPair, wait_until
from tests.broker_variants.conftest import OpenCeleryApp, run_tasks
from tests.conformance.celery_app import CeleryApp

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def pair() -> Iterator[SentinelPair]:
    with SentinelPair() as pair:
        yield pair


@pytest.fixture
def place(pair: SentinelPair, open_celery_app: OpenCeleryApp) -> CeleryApp:
    return open_celery_app(
        pair.url(scheme="dq-sentinel"),
        broker_transport_options={"master_name": pair.name},
        dq_lease=5,
        task_publish_retry_policy={"max_retries": None, "interval_start": 0.1, "interval_step": 0.1},
        task_acks_late=True,
    )


class Publisher(threading.Thread):
    """Publishes numbered tasks until :meth:`stop`, and records the start of each confirmed publish."""

    def __init__(self, place: CeleryApp) -> None:
        super().__init__(daemon=True)
        self._place = place
        self._over = threading.Event()
        self.confirmed: dict[int, float] = {}

    def run(self) -> None:
        number = 0
        while not self._over.is_set():
            begun_at = time.monotonic()
            self._place.send("report", self._place.queue, number, ignore_result=True)
            self.confirmed[number] = begun_at
            number += 1

    def stop(self) -> None:
        self._over.set()
        self.join(60)
        assert not self.is_alive()


def replicate(pair: SentinelPair) -> None:
    """Wait until the replica has all present data of the master."""
    replica = pair.replica

    def offset(server: RedisServer, of: str) -> int:
        (found,) = re.findall(rf"{of}_repl_offset:(\d+)", str(server.ask("INFO", "replication")))
        return int(found)

    written = offset(pair.master, "master")
    wait_until(lambda: offset(replica, "slave") >= written, 30, what="replication")


def ran(place: CeleryApp) -> list[int]:
    return [int(value) for value in place.witness.reports(place.queue)]


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_a_failover_under_load_loses_only_messages_that_were_not_replicated(
    pair: SentinelPair, place: CeleryApp, pool: str
) -> None:
    publisher = Publisher(place)
    with place.worker(pool) as worker:
        publisher.start()
        wait_until(lambda: len(ran(place)) > 100, 60)
        replicated = set(publisher.confirmed.copy())
        replicate(pair)
        # When the master dies
        pair.fail_over()
        replaced_at = time.monotonic()
        promoted = len(publisher.confirmed)
        wait_until(
            lambda: len(publisher.confirmed) > promoted + 100, 60, what="publishing after the failover"
        )
        publisher.stop()
        # Then each message runs that was replicated, or whose publish began after the failover.
        late = {number for number, begun_at in publisher.confirmed.items() if begun_at > replaced_at}
        owed = replicated | late
        wait_until(lambda: owed <= set(ran(place)), 60, what=lambda: f"missing: {owed - set(ran(place))}")
        assert worker.alive
        wait_until(lambda: place.waiting() == 0, 60)
        # Messages whose acks were not replicated run twice; they are few.
        repeated = len(ran(place)) - len(set(ran(place)))
        assert repeated < len(publisher.confirmed) / 4


def test_confirmed_by_a_replica_means_that_nothing_is_lost(
    pair: SentinelPair, open_celery_app: OpenCeleryApp
) -> None:
    place = open_celery_app(
        pair.url(scheme="dq-sentinel"),
        broker_transport_options={"master_name": pair.name},
        dq_confirm_replicas=1,
        dq_lease=5,
        task_acks_late=True,
    )
    for number in range(200):
        place.send("report", place.queue, number, ignore_result=True)
    with place.worker("prefork") as worker:
        wait_until(lambda: len(ran(place)) > 20, 60)
        pair.fail_over()
        wait_until(lambda: set(ran(place)) == set(range(200)), 60)
        assert worker.alive


def test_a_running_task_outlives_the_failover(pair: SentinelPair, place: CeleryApp) -> None:
    with place.worker("prefork") as worker:
        key = place.queue
        place.send("hold_late", key)
        place.witness.wait(f"started:{key}")
        pair.fail_over()
        worker.wait_for_log("Connected to dq-sentinel", 60, occurrences=2)
        place.witness.release(key, 5)
        place.witness.wait(f"finished:{key}", 30)
        # The ack reached the new master, so the message is not delivered again.
        wait_until(lambda: place.waiting() == 0, 60)
        assert place.send("add", 1, 1).get(timeout=30) == 2
        assert place.witness.reports(f"started:{key}") == []


def test_the_sentinels_of_a_list_are_one_broker(pair: SentinelPair, open_celery_app: OpenCeleryApp) -> None:
    # No Sentinel listens at the first address.
    url = f"dq-sentinel://127.0.0.1:1;{pair.url(3, scheme='dq-sentinel')}"
    run_tasks(open_celery_app(url, broker_transport_options={"master_name": pair.name}), "prefork")


def test_a_closed_channel_closes_its_own_connections_to_a_sentinel_only(
    pair: SentinelPair, open_celery_app: OpenCeleryApp
) -> None:
    place = open_celery_app(
        pair.url(scheme="dq-sentinel"), broker_transport_options={"master_name": pair.name}
    )
    with place.app.connection_for_read() as connection:
        channel: Any = connection.channel()
        assert channel.client.ping()
        clients = [channel.client, channel.own_clients()()]
        assert clients[1].ping()
        channel.close()
        managers = [client.connection_pool.sentinel_manager for client in clients]
        own, other = ([idle_connections(sentinel) for sentinel in manager.sentinels] for manager in managers)
        assert any(connection._sock is not None for found in other for connection in found)
        if hasattr(managers[0], "close"):
            assert all(connection._sock is None for found in own for connection in found)
        managers[1].sentinels[0].close()


def idle_connections(client: Any) -> list[Any]:
    return list(client.connection_pool._available_connections)


def test_a_list_without_a_master_name_is_a_clear_error(
    pair: SentinelPair, open_celery_app: OpenCeleryApp
) -> None:
    place = open_celery_app(pair.url(scheme="dq-sentinel"))
    with pytest.raises((ConfigurationError, OperationalError), match="master_name"):
        place.send("add", 1, 1, retry=False)


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_worker_survives_a_server_that_becomes_read_only(
    open_celery_app: OpenCeleryApp, server_binary: str, pool: str
) -> None:
    # Given a worker whose server becomes a replica, like a master that Sentinel has replaced
    with RedisServer(binary=server_binary) as other, RedisServer(binary=server_binary) as server:
        place = open_celery_app(server.url(scheme="dq-redis"), dq_lease=5)
        with place.worker(pool) as worker:
            assert place.send("add", 1, 1).get(timeout=30) == 2
            server.ask("REPLICAOF", "127.0.0.1", other.port)
            with pytest.raises(OperationalError):
                place.send("add", 1, 1, retry=False)
            # When it is a master again
            server.ask("REPLICAOF", "NO", "ONE")
            # Then the same worker works.
            assert place.send("add", 2, 2).get(timeout=40) == 4
            assert worker.alive
