"""Lost connections: the worker connects again, running tasks run once, and no resource leaks."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import kombu
import psutil
import pytest
import redis

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_calls import load_scripts
from tests.broker.kombu_client import KombuClient, bodies
from tests.broker.proxy import Proxy
from tests.broker.worker_app import WorkerApp


@pytest.fixture
def worker_app(server: RedisServer) -> Iterator[WorkerApp]:
    worker_app = WorkerApp(server)
    yield worker_app
    worker_app.close()


def kill_connections(worker_app: WorkerApp, worker: Any) -> int:
    """Kill the broker connections of the worker; return their number."""
    pids = {worker.pid, *(child.pid for child in worker.children())}
    ours = {
        connection.laddr.port
        for pid in pids
        for connection in psutil.Process(pid).net_connections(kind="tcp")
        if connection.raddr and connection.raddr.port == worker_app.server.port
    }
    killed = 0
    for client in worker_app.client.client_list():
        if int(client["addr"].rsplit(":", 1)[1]) in ours and int(client["db"]) == 1:
            killed += worker_app.client.client_kill_filter(_id=client["id"])
    return killed


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_running_tasks_survive_a_lost_connection(worker_app: WorkerApp, pool: str) -> None:
    app: Any = worker_app.app
    app.dq.quotas.set(worker_app.queue, "7", concurrency=3)
    with worker_app.worker(pool, 3, warm=True) as worker:
        for key in ("early", "late"):
            worker_app.send("hold" if key == "early" else "hold_late", key, tenant="7")
        worker_app.ran(2, subject="began")
        killed = sum(kill_connections(worker_app, worker) for _ in range(3))
        assert killed
        worker_app.send("note", "between")
        worker_app.ran(1)
        kill_connections(worker_app, worker)
        worker_app.send("note", "after")
        worker_app.ran(2)
        assert worker_app.client.hgetall(worker_app.keys.running)[b"7"] == b"2"
        worker_app.witness.release("early")
        worker_app.witness.release("late")
        worker_app.ran(2, subject="ended")
        worker_app.settled()
        assert sorted(worker_app.witness.reports("began")) == ["early", "late"]
        assert worker_app.witness.reports("ran") == ["between", "after"]
    wait_until(lambda: not worker_app.client.exists(worker_app.keys.leases), 30)
    assert worker_app.dead() == {}


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_cut_claims_do_not_use_up_the_pool_while_a_task_runs(server: RedisServer, pool: str) -> None:
    """A running task keeps the lease, and so the consumer thread outlives each connection of the worker."""
    most = 8
    with Proxy(server.port) as proxy:
        worker_app = WorkerApp(server, proxy.port, broker_transport_options={"max_connections": most})
        claim = Partition(worker_app.keys, load_scripts()).claim("", lease_ms=1, want=1)
        with worker_app.worker(pool, 2):
            worker_app.send("hold_late", "long")
            worker_app.ran(1, subject="began")
            for n in range(1, most + 2):
                proxy.cut_requests, proxy.cuts_left = claim.script.sha1.encode(), 1
                worker_app.send("note", n)
                worker_app.ran(n)
                assert proxy.cut == n
            worker_app.witness.release("long")
            worker_app.ran(1, subject="ended")
            worker_app.settled()
        worker_app.close()


def test_a_restart_of_the_broker(worker_app: WorkerApp, server: RedisServer) -> None:
    with worker_app.worker("threads", 2) as worker:
        worker_app.send("hold", "over the restart")
        worker_app.ran(1, subject="began")
        worker_app.send("note", "delayed", countdown=1)
        server.kill()
        server.start()
        worker_app.send("note", "after")
        worker_app.witness.release("over the restart")
        assert sorted(worker_app.ran(2)) == ["after", "delayed"]
        worker_app.ran(1, subject="ended")
        worker_app.settled()
        assert worker_app.witness.reports("began") == ["over the restart"]
        assert worker.alive


def test_a_black_hole(server: RedisServer) -> None:
    with Proxy(server.port) as proxy:
        worker_app = WorkerApp(
            server,
            proxy.port,
            broker_transport_options={"socket_timeout": 1.0, "socket_connect_timeout": 1.0},
            dq_lease=2.0,
        )
        with worker_app.worker("threads", 1):
            worker_app.send("hold_late", "in the dark")
            worker_app.ran(1, subject="began")
            proxy.black_hole.set()
            # The lease expires, and another worker takes the message.
            direct = WorkerApp(server, dq_lease=2.0)
            direct.queue = worker_app.queue
            direct.conf["task_default_queue"] = worker_app.queue
            direct.keys = worker_app.keys
            with direct.worker("threads", 1):
                worker_app.ran(2, subject="began")
                proxy.black_hole.clear()
                proxy.cut_all()
                worker_app.witness.release("in the dark", 2)
                worker_app.ran(2, subject="ended")
                worker_app.settled()
                for n in range(6):
                    worker_app.send("note", n)
                worker_app.ran(6)
                worker_app.settled()
            direct.close()
        worker_app.close()


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_server_that_closes_idle_connections_costs_a_consumer_nothing(
    server: RedisServer, is_busy: bool
) -> None:
    kombu_client = KombuClient(server.url())
    kombu_client.publish("a", "b")

    def clients() -> set[str]:
        return set(re.findall(r"^id=(\d+)", str(server.ask("CLIENT", "LIST")), re.M))

    with kombu_client.connect() as connection, kombu_client.consuming(connection, prefetch=1) as got:
        kombu_client.drain(connection, got, 1)
        if not is_busy:
            got[0].ack()
            kombu_client.drain(connection, got, 2)
            got[1].ack()
            kombu_client.drain_until(connection, lambda: kombu_client.depth() == 0)
        before = clients()
        server.ask("CONFIG", "SET", "timeout", "1")
        # The server closes the connections for scripts and for commands, which are idle.
        kombu_client.drain_until(connection, lambda: len(before - clients()) >= 2)
        server.ask("CONFIG", "SET", "timeout", "0")
        if is_busy:
            got[0].ack()
        else:
            kombu_client.publish("b")
        kombu_client.drain(connection, got, 2 + (not is_busy))
        assert bodies(got)[-1] == "b"
        got[-1].ack()
    kombu_client.close()


def test_a_queue_that_expires_is_bound_while_other_clients_flush_the_scripts(
    kombu_client: KombuClient,
) -> None:
    """A worker binds such queues for remote control and gossip at each reconnect."""
    over = threading.Event()

    def flush() -> None:
        with redis.Redis.from_url(kombu_client.url) as client:
            while not over.is_set():
                client.script_flush()

    flushing = [threading.Thread(target=flush) for _ in range(2)]
    for each in flushing:
        each.start()
    try:
        with kombu_client.connect() as connection:
            for number in range(200):
                exchange = kombu.Exchange(f"storm-{number}", type="direct")
                kombu.Queue(
                    f"storm-{number}",
                    exchange,
                    expires=60,
                    auto_delete=True,
                    channel=connection.default_channel,
                ).declare()
            assert connection.default_channel.get_table("storm-199")
    finally:
        over.set()
        for each in flushing:
            each.join()
