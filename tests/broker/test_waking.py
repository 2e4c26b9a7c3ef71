"""Waking without polling: who is told, how soon, and how little is said meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.partition import Partition, load_scripts
from tests.broker.counter import Counter
from tests.broker.yard import Yard

#: Seconds in which somebody is told, however slow the machine is, rather than by the next heartbeat.
SOON_S = 8


@pytest.fixture
def yard(redis_server: RedisServer) -> Iterator[Yard]:
    for db in (1, 2, 3):
        redis_server.flush(db)
    yard = Yard(redis_server, dq_lease=240.0)  # a heartbeat every 60 s is no help in these tests
    yield yard
    yard.close()


def test_an_idle_worker_says_nothing_but_its_heartbeat() -> None:
    with RedisServer() as server:
        yard = Yard(server, dq_lease=2.0)
        with yard.worker("threads", 2):
            yard.send("note", 1)
            yard.ran(1)
            yard.settled()
            said: list[str] = []
            beats: list[float] = []
            with yard.client.monitor() as monitor:
                over = threading.Timer(60, yard.client.set, ("the end", 1))
                over.start()
                for command in monitor.listen():
                    assert "the end" not in command["command"], said
                    if command["client_type"] != "lua" and command["db"] == 1:
                        said.append(command["command"][:60])
                        if said[-1].startswith("EVALSHA"):
                            beats.append(command["time"])
                            if len(beats) == 6:
                                break
                over.cancel()
            # Four heartbeats per lease, by the server's clock: the first one may have come late.
            took_s = beats[-1] - beats[0]
            assert len(beats) <= 2 * (took_s + 1) + 1, said
            # BLPOP anew every ten seconds; the first beat may have to connect and to send its script.
            assert len(said) - len(beats) <= 5 + took_s / 10, said
            assert {each.split()[0] for each in said} <= {
                "EVALSHA",
                "BLPOP",
                "SELECT",
                "HELLO",
                "CLIENT",
                "EVAL",
            }, said
        yard.close()


def test_one_message_for_many_idle_consumers_makes_no_herd() -> None:
    with RedisServer() as server:
        counter = Counter(server.url())
        crowd: list[tuple[Any, Any, list[Any]]] = []
        stop = threading.Event()

        def consume(connection: Any) -> None:
            while not stop.is_set():
                try:
                    connection.drain_events(timeout=0.2)
                except TimeoutError:
                    continue

        for _ in range(8):
            connection = counter.connect(lease="60s")
            context = counter.consuming(connection, prefetch=4)
            crowd.append((connection, context, context.__enter__()))

        def has(count: int) -> bool:
            return sum(len(got) for _, _, got in crowd) == count

        threads = [threading.Thread(target=consume, args=(connection,)) for connection, _, _ in crowd]
        for thread in threads:
            thread.start()
        try:
            claim = counter.partition.claim("x", lease_ms=1, want=1).script.sha1
            with counter.connect() as connection:
                counter.publish("warm", connection=connection)
                wait_until(partial(has, 1), 30)
                with counter.client.monitor() as monitor:
                    for n in range(10):
                        counter.publish(n, connection=connection)
                        wait_until(partial(has, n + 2), 30)
                    counter.client.set("over", 1)
                    claims = 0
                    for command in monitor.listen():
                        if "over" in command["command"]:
                            break
                        claims += command["command"].startswith(f"EVALSHA {claim}")
            # One that gets it, and at most one that finds nothing more.
            assert claims <= 30, claims
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            for _, context, _ in crowd:
                context.__exit__(None, None, None)
            counter.close()


@pytest.mark.parametrize("pool", ["threads", "prefork", "solo", "gevent"])
def test_delayed_tasks_start_when_they_are_due(yard: Yard, pool: str) -> None:
    with yard.worker(pool, 2):
        # So late that all are published before.
        start = time.time() + 1.5
        dues = [start + n * 0.01 for n in range(50)]
        # Published in any order; not one of them lies in the worker's memory meanwhile.
        for n in sorted(range(50), key=lambda n: (n * 7) % 50):
            yard.send("timed", dues[n], countdown=dues[n] - time.time())
        assert yard.client.hlen(yard.keys.messages) >= 40
        late = sorted(float(each) for each in yard.ran(50, subject="late"))
        assert late[0] > -0.005
        yard.settled()
        print(f"{pool}: median {late[25] * 1000:.1f} ms, p99 {late[49] * 1000:.1f} ms")
        assert late[25] < SOON_S  # by a heartbeat it would be more; figures are for the benchmarks


def test_the_next_one_keeps_the_appointment_of_who_died(yard: Yard) -> None:
    with yard.worker("threads", 1) as keeper:
        yard.send("note", "warm")
        yard.ran(1)
        due = time.time() + 2.0
        yard.send("timed", due, countdown=2.0)
        wait_until(lambda: yard.client.hget(yard.keys.state, "appt_owner"), 30)
        with yard.worker("threads", 1):
            os.kill(keeper.pid, signal.SIGTERM)
            late = float(yard.ran(1, subject="late", timeout_s=60)[0])
            assert late < SOON_S
            yard.settled()


@pytest.mark.parametrize("stops", [False, True])
def test_a_full_worker_hands_its_appointments_on(yard: Yard, stops: bool) -> None:
    """They are due while it works, and while it is told to stop and works on; somebody else is idle."""
    with yard.worker("threads", 1) as full:
        for countdown in (3.0, 3.3, 3.6):
            yard.send("timed", time.time() + countdown, countdown=countdown)
        wait_until(lambda: yard.client.hget(yard.keys.state, "appt_owner"))
        yard.send("hold", "long")
        yard.ran(1, subject="began")
        with yard.worker("threads", 1):
            if stops:
                os.kill(full.pid, signal.SIGTERM)
            late = [float(each) for each in yard.ran(3, subject="late", timeout_s=20)]
            yard.witness.release("long")
            assert max(late) < 8, late
            yard.settled()


def test_a_busy_solo_worker_hands_its_appointments_on(yard: Yard) -> None:
    """The delayed message is due while its keeper works; somebody else is idle."""
    with yard.worker("solo", 1):
        yard.send("note", "warm")
        yard.ran(1)
        due = time.time() + 1.5
        yard.send("timed", due, countdown=1.5)
        wait_until(lambda: yard.client.hget(yard.keys.state, "appt_owner"), 30)
        yard.send("hold", "long")
        yard.ran(1, subject="began")
        with yard.worker("threads", 1):
            late = float(yard.ran(1, subject="late", timeout_s=60)[0])
            yard.witness.release("long")
            assert late < SOON_S
            yard.settled()


def test_a_solo_worker_that_is_busy_with_another_queue_hands_its_appointments_on(yard: Yard) -> None:
    other = yard.queue + "-other"
    with yard.worker("threads", 1, queues=[yard.queue]) as second:
        yard.send("hold", "second")
        yard.ran(1, subject="began")
        with yard.worker("solo", 1, queues=[yard.queue, other]):
            due = time.time() + 2.0
            yard.send("timed", due, countdown=2.0)
            wait_until(lambda: yard.client.hget(yard.keys.state, "appt_owner"), 30)
            owner = yard.client.hget(yard.keys.state, "appt_owner")
            yard.send("hold", "solo", queue=other)
            yard.ran(2, subject="began")
            yard.witness.release("second")
            late = float(yard.ran(1, subject="late", timeout_s=60)[0])
            yard.witness.release("solo")
            assert late < SOON_S, (owner, second.pid, late)
            yard.settled()


def test_a_suspect_does_not_eat_the_tokens_of_others(yard: Yard) -> None:
    with yard.worker("threads", 4) as first:
        yard.send("hold_late", "suspect")
        yard.ran(1, subject="began")
        yard.client.zadd(yard.keys.leases, {yard.client.zrange(yard.keys.leases, 0, 0)[0]: 1})
        partition = Partition(yard.keys, load_scripts())
        assert partition.renew("thief", lease_ms=1).run(yard.client).reaped == 1
        with yard.worker("threads", 4):
            # It is reaped as if its worker had died, and somebody has it as a suspect.
            wait_until(lambda: len(yard.witness.told("began")) == 2, 30)
            late: list[str] = []
            for _ in range(20):
                yard.send("timed", time.time())
                late = yard.ran(len(late) + 1, subject="late")
            assert max(float(each) for each in late) < SOON_S, late
            yard.witness.release("suspect", 2)
            yard.ran(2, subject="ended")
            yard.settled()
            assert first.alive


def test_priorities_and_order(redis_server: RedisServer) -> None:
    for db in (1, 2, 3):
        redis_server.flush(db)
    yard = Yard(redis_server)
    for n in range(30):
        yard.send("note", f"{n % 10}-{n // 10}", priority=n % 10)
    with yard.worker("threads", 1):
        assert yard.ran(30) == [f"{p}-{n}" for p in reversed(range(10)) for n in range(3)]
        yard.settled()
    yard.close()
