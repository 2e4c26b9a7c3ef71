"""Lost connections: the worker comes back, what runs runs once, and nothing leaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.broker.proxy import Proxy
from tests.broker.yard import Yard


@pytest.fixture
def yard(server: RedisServer) -> Iterator[Yard]:
    yard = Yard(server)
    yield yard
    yard.close()


def kill_connections(yard: Yard, worker: Any) -> int:
    """Kill the broker connections of the worker; return how many."""
    pids = {worker.pid, *(child.pid for child in worker.children())}
    ours = {
        connection.laddr.port
        for pid in pids
        for connection in psutil.Process(pid).net_connections(kind="tcp")
        if connection.raddr and connection.raddr.port == yard.server.port
    }
    killed = 0
    for client in yard.client.client_list():
        if int(client["addr"].rsplit(":", 1)[1]) in ours and int(client["db"]) == 1:
            killed += yard.client.client_kill_filter(_id=client["id"])
    return killed


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_what_runs_goes_on_over_a_lost_connection(yard: Yard, pool: str) -> None:
    app: Any = yard.app
    app.dq.quotas.set(yard.queue, "7", concurrency=3)
    with yard.worker(pool, 3, warm=True) as worker:
        for key in ("early", "late"):
            yard.send("hold" if key == "early" else "hold_late", key, tenant="7")
        yard.ran(2, subject="began")
        killed = sum(kill_connections(yard, worker) for _ in range(3))
        assert killed
        yard.send("note", "between")
        yard.ran(1)
        kill_connections(yard, worker)
        yard.send("note", "after")
        yard.ran(2)
        assert yard.client.hgetall(yard.keys.running)[b"7"] == b"2"
        yard.witness.release("early")
        yard.witness.release("late")
        yard.ran(2, subject="ended")
        yard.settled()
        assert sorted(yard.witness.told("began")) == ["early", "late"]
        assert yard.witness.told("ran") == ["between", "after"]
    wait_until(lambda: not yard.client.exists(yard.keys.leases), 30)
    assert yard.dead() == {}


def test_reconnecting_leaks_nothing(yard: Yard) -> None:
    with yard.worker("threads", 2) as worker:
        process = psutil.Process(worker.pid)

        def shape() -> tuple[int, int]:
            return process.num_fds(), process.num_threads()

        def round_(n: int) -> None:
            assert kill_connections(yard, worker)
            worker.wait_for_log("Connected to", occurrences=n + 1)
            yard.send("note", n)
            yard.ran(n)

        for n in range(1, 4):
            round_(n)
        before = shape()
        for n in range(4, 14):
            round_(n)
        wait_until(lambda: shape() <= (before[0] + 1, before[1]), 30, what=lambda: f"{before}, now {shape()}")
        yard.settled()


def test_a_restart_of_the_broker(yard: Yard, server: RedisServer) -> None:
    with yard.worker("threads", 2) as worker:
        yard.send("hold", "over the restart")
        yard.ran(1, subject="began")
        yard.send("note", "delayed", countdown=1)
        server.kill()
        server.start()
        yard.send("note", "after")
        yard.witness.release("over the restart")
        assert sorted(yard.ran(2)) == ["after", "delayed"]
        yard.ran(1, subject="ended")
        yard.settled()
        assert yard.witness.told("began") == ["over the restart"]
        assert worker.alive


def test_a_black_hole(server: RedisServer) -> None:
    with Proxy(server.port) as proxy:
        yard = Yard(
            server,
            proxy.port,
            broker_transport_options={"socket_timeout": 1.0, "socket_connect_timeout": 1.0},
            dq_lease=2.0,
        )
        with yard.worker("threads", 1):
            yard.send("hold_late", "in the dark")
            yard.ran(1, subject="began")
            proxy.black_hole.set()
            # Its lease runs out, and somebody else takes the message.
            direct = Yard(server, dq_lease=2.0)
            direct.queue = yard.queue
            direct.conf["task_default_queue"] = yard.queue
            direct.keys = yard.keys
            with direct.worker("threads", 1):
                yard.ran(2, subject="began")
                proxy.black_hole.clear()
                proxy.cut_all()
                yard.witness.release("in the dark", 2)
                yard.ran(2, subject="ended")
                yard.settled()
                for n in range(6):
                    yard.send("note", n)
                yard.ran(6)
                yard.settled()
            direct.close()
        yard.close()
