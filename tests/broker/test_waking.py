"""Wake-ups without polling: their receivers, their delay, and the number of commands in between."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from typing import Any

import pytest

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_calls import load_scripts
from tests.broker.kombu_client import KombuClient
from tests.broker.worker_app import OpenApp, WorkerApp

#: Seconds in which a wake-up arrives, also on a slow machine. The next heartbeat would come later.
SOON_S = 8


@pytest.fixture
def worker_app(open_app: OpenApp) -> WorkerApp:
    return open_app(dq_lease=240.0)  # with a heartbeat every 60 s, none comes during these tests


def test_an_idle_worker_sends_only_its_heartbeat() -> None:
    with RedisServer() as server:
        worker_app = WorkerApp(server, dq_lease=2.0)
        with worker_app.worker("threads", 2):
            worker_app.send("note", 1)
            worker_app.ran(1)
            worker_app.settled()
            text: list[str] = []
            beats: list[float] = []
            with worker_app.client.monitor() as monitor:
                over = threading.Timer(60, worker_app.client.set, ("monitor-is-over", 1))
                over.start()
                for command in monitor.listen():
                    assert "monitor-is-over" not in command["command"], text
                    if command["client_type"] != "lua" and command["db"] == 1:
                        text.append(command["command"][:60])
                        if text[-1].startswith("EVALSHA"):
                            beats.append(command["time"])
                            if len(beats) == 6:
                                break
                over.cancel()
            # Four heartbeats per lease, by the server's clock: the first one may have come late.
            took_s = beats[-1] - beats[0]
            assert len(beats) <= 2 * (took_s + 1) + 1, text
            # A BLPOP every ten seconds; the first heartbeat may also connect and load its script.
            assert len(text) - len(beats) <= 5 + took_s / 10, text
            assert {each.split()[0] for each in text} <= {
                "EVALSHA",
                "BLPOP",
                "SELECT",
                "HELLO",
                "CLIENT",
                "EVAL",
            }, text
        worker_app.close()


def test_one_message_does_not_wake_all_idle_consumers() -> None:
    with RedisServer() as server:
        kombu_client = KombuClient(server.url())
        crowd: list[tuple[Any, Any, list[Any]]] = []
        stop = threading.Event()

        def consume(connection: Any) -> None:
            while not stop.is_set():
                try:
                    connection.drain_events(timeout=0.2)
                except TimeoutError:
                    continue

        for _ in range(8):
            connection = kombu_client.connect(lease="60s")
            context = kombu_client.consuming(connection, prefetch=4)
            crowd.append((connection, context, context.__enter__()))

        def has(count: int) -> bool:
            return sum(len(got) for _, _, got in crowd) == count

        threads = [threading.Thread(target=consume, args=(connection,)) for connection, _, _ in crowd]
        for thread in threads:
            thread.start()
        try:
            claim = kombu_client.partition.claim("x", lease_ms=1, want=1).script.sha1
            with kombu_client.connect() as connection:
                kombu_client.publish("warm", connection=connection)
                wait_until(partial(has, 1), 30)
                with kombu_client.client.monitor() as monitor:
                    for n in range(10):
                        kombu_client.publish(n, connection=connection)
                        wait_until(partial(has, n + 2), 30)
                    kombu_client.client.set("over", 1)
                    claims = 0
                    for command in monitor.listen():
                        if "over" in command["command"]:
                            break
                        claims += command["command"].startswith(f"EVALSHA {claim}")
            # Per message, one claim takes it, and at most one other finds no more.
            assert claims <= 30, claims
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            for _, context, _ in crowd:
                context.__exit__(None, None, None)
            kombu_client.close()


@pytest.mark.parametrize("pool", ["threads", "prefork", "solo", "gevent"])
def test_delayed_tasks_start_when_they_are_due(worker_app: WorkerApp, pool: str) -> None:
    with worker_app.worker(pool, 2):
        # Late enough that all messages are published before, on a slow machine too.
        began = time.monotonic()
        for _ in range(5):
            worker_app.send("note", "warm")
        start = time.time() + 1.5 + 20 * (time.monotonic() - began)
        dues = [start + n * 0.01 for n in range(50)]
        # The publishing order differs from the due order, and the worker keeps none in its own timer.
        for n in sorted(range(50), key=lambda n: (n * 7) % 50):
            worker_app.send("timed", dues[n], countdown=dues[n] - time.time())
        assert worker_app.client.hlen(worker_app.keys.messages) >= 40
        late = sorted(float(each) for each in worker_app.ran(50, subject="late"))
        assert late[0] > -0.005
        worker_app.settled()
        print(f"{pool}: median {late[25] * 1000:.1f} ms, p99 {late[49] * 1000:.1f} ms")
        assert late[25] < SOON_S  # a heartbeat would come later; the benchmarks measure figures


@pytest.mark.parametrize("stops", [False, True])
def test_a_full_worker_hands_its_next_looks_over(worker_app: WorkerApp, stops: bool) -> None:
    """The delayed messages are due while their worker is full, or stops with a running task."""
    with worker_app.worker("threads", 1) as full:
        due = time.time() + 3.0
        for countdown in (3.0, 3.3, 3.6):
            worker_app.send("timed", time.time() + countdown, countdown=countdown)
        wait_until(lambda: worker_app.client.hget(worker_app.keys.state, "next_look_owner"))
        worker_app.send("hold", "long")
        worker_app.ran(1, subject="began")
        with worker_app.worker("threads", 1):
            # On a slow machine, this worker starts after the messages are due.
            started_late = max(time.time() - due, 0)
            if stops:
                os.kill(full.pid, signal.SIGTERM)
            late = [float(each) for each in worker_app.ran(3, subject="late", timeout_s=60)]
            worker_app.witness.release("long")
            assert max(late) - started_late < SOON_S, late
            worker_app.settled()


def test_a_busy_solo_worker_hands_its_next_look_over(worker_app: WorkerApp) -> None:
    """The delayed message is due while its worker is busy, and another worker is idle."""
    with worker_app.worker("solo", 1):
        worker_app.send("note", "warm")
        worker_app.ran(1)
        due = time.time() + 1.5
        worker_app.send("timed", due, countdown=1.5)
        wait_until(lambda: worker_app.client.hget(worker_app.keys.state, "next_look_owner"), 30)
        worker_app.send("hold", "long")
        worker_app.ran(1, subject="began")
        with worker_app.worker("threads", 1):
            # On a slow machine, this worker starts after the message is due.
            started_late = max(time.time() - due, 0)
            late = float(worker_app.ran(1, subject="late", timeout_s=60)[0])
            worker_app.witness.release("long")
            assert late - started_late < SOON_S
            worker_app.settled()


def test_a_solo_worker_that_is_busy_with_another_queue_hands_its_next_look_over(
    worker_app: WorkerApp,
) -> None:
    other = worker_app.queue + "-other"
    with worker_app.worker("threads", 1, queues=[worker_app.queue]) as second:
        worker_app.send("hold", "second")
        worker_app.ran(1, subject="began")
        with worker_app.worker("solo", 1, queues=[worker_app.queue, other]):
            due = time.time() + 2.0
            worker_app.send("timed", due, countdown=2.0)
            wait_until(lambda: worker_app.client.hget(worker_app.keys.state, "next_look_owner"), 30)
            owner = worker_app.client.hget(worker_app.keys.state, "next_look_owner")
            worker_app.send("hold", "solo", queue=other)
            worker_app.ran(2, subject="began")
            worker_app.witness.release("second")
            late = float(worker_app.ran(1, subject="late", timeout_s=60)[0])
            worker_app.witness.release("solo")
            assert late < SOON_S, (owner, second.pid, late)
            worker_app.settled()


def test_a_suspect_does_not_consume_the_wakeups_of_other_messages(worker_app: WorkerApp) -> None:
    with worker_app.worker("threads", 4) as first:
        worker_app.send("hold_late", "suspect")
        worker_app.ran(1, subject="began")
        worker_app.client.zadd(
            worker_app.keys.leases, {worker_app.client.zrange(worker_app.keys.leases, 0, 0)[0]: 1}
        )
        partition = Partition(worker_app.keys, load_scripts())
        assert partition.heartbeat("other", lease_ms=1).run(worker_app.client).reaped == 1
        with worker_app.worker("threads", 4):
            # The message is reaped as if its worker had died, and a worker runs it as a suspect.
            wait_until(lambda: len(worker_app.witness.reports("began")) == 2, 30)
            late: list[str] = []
            for _ in range(20):
                worker_app.send("timed", time.time())
                late = worker_app.ran(len(late) + 1, subject="late")
            assert max(float(each) for each in late) < SOON_S, late
            worker_app.witness.release("suspect", 2)
            worker_app.ran(2, subject="ended")
            worker_app.settled()
            assert first.alive
