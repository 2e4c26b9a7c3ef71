"""Workers that die with a claim in hand: the key goes on, and nobody meets anybody."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from celery_dq.dedup.machine import Verdict
from celery_dq.keys import ClaimKeys
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.conformance.mailroom import kill_connections
from tests.dedup.crew import NAME, add_tasks
from tests.workers import WorkerProcess, make_app


class Crew:
    def __init__(self, url: str, witness_url: str, scheme: str = "dq-redis") -> None:
        self.conf = {
            "broker_url": url.replace("redis://", f"{scheme}://"),
            "result_backend": url,
            "witness": witness_url,
            "task_default_queue": "cache",
            "dq_lease": 1.0,
        }
        self.app: Any = add_tasks(make_app(NAME, None, self.conf))
        self.witness: Any = redis.Redis.from_url(witness_url, decode_responses=True)

    def worker(self, name: str = "w1") -> WorkerProcess:
        return WorkerProcess(
            "tests.dedup.crew", broker=None, conf=self.conf, pool="prefork", name=name
        ).start()

    def send(self, task: str, version: int, **options: Any) -> Any:
        return self.app.tasks[task].apply_async((1, version), **options)

    def ran(self, count: int) -> list[str]:
        """What ran, once it is that many."""
        wait_until(lambda: self.witness.llen("runs") >= count, 20, what=lambda: str(self.runs()))
        return [version for version, _, _ in self.runs()]

    def runs(self) -> list[list[str]]:
        return [each.split(":") for each in self.witness.lrange("runs", 0, -1)]

    def meetings(self) -> int:
        return sum(int(met) for _, _, met in self.runs())

    def open(self, times: int = 1) -> None:
        self.witness.rpush("door:1", *["go"] * times)

    def left(self) -> None:
        """The dead one is inside no more."""
        self.witness.decr("inside:1")


@pytest.fixture
def crew(redis_url: str, redis_server: RedisServer) -> Iterator[Crew]:
    crew = Crew(redis_url, redis_server.url(0))
    redis_server.flush(0)
    yield crew
    crew.witness.close()
    crew.app.pool.force_close_all()
    redis_server.flush(0)


def kill(worker: WorkerProcess) -> None:
    """SIGKILL, for the worker and its pool."""
    for child in worker.children():
        child.kill()
    worker.stop(signal.SIGKILL)


def start_two(crew: Crew, task: str) -> tuple[WorkerProcess, Any]:
    """A worker that runs the head, and the result of the tail behind it."""
    worker = crew.worker().wait_ready()
    crew.send(task, 1)
    crew.ran(1)
    tail = crew.send(task, 2)
    assert tail.verdict is Verdict.BLOCK
    return worker, tail


def test_a_killed_worker_whose_task_was_acknowledged(crew: Crew) -> None:
    first, tail = start_two(crew, "early")
    second = crew.worker("w2").wait_ready()
    try:
        kill(first)
        crew.left()
        crew.open(2)
        assert tail.get(timeout=15) == [1, 2]
        assert crew.ran(2) == ["1", "2"]
        assert crew.meetings() == 0
    finally:
        first.discard()
        second.discard()


def test_a_killed_worker_whose_task_comes_back(crew: Crew) -> None:
    first, tail = start_two(crew, "late")
    second = crew.worker("w2").wait_ready()
    try:
        kill(first)
        crew.left()
        assert crew.ran(2) == ["1", "1"]
        assert crew.send("late", 3).id == tail.id
        crew.open(3)
        assert tail.get(timeout=15) == [1, 2]
        assert crew.ran(3) == ["1", "1", "2"]
        assert crew.meetings() == 0
    finally:
        first.discard()
        second.discard()


def test_a_killed_pool_process(crew: Crew) -> None:
    worker, tail = start_two(crew, "early")
    try:
        crew.left()
        os.kill(int(crew.runs()[0][1]), signal.SIGKILL)
        # One for the dead one, whose connection the server may not have missed yet.
        crew.open(2)
        assert tail.get(timeout=15) == [1, 2]
        assert crew.meetings() == 0
    finally:
        worker.discard()


def test_the_timeout_is_a_time_limit_where_the_pool_can_end_a_task(crew: Crew) -> None:
    worker, tail = start_two(crew, "limited")
    try:
        wait_until(lambda: "TimeLimitExceeded" in worker.log, 15, what=lambda: worker.log[-2000:])
        crew.left()
        crew.open(2)
        assert tail.get(timeout=15) == [1, 2]
        assert "evict" not in crew.app.dq.dedup["cache"].verdicts()
    finally:
        worker.discard()


def test_another_broker_on_a_prefork_pool(redis_url: str, redis_server: RedisServer) -> None:
    redis_server.flush(0)
    crew = Crew(redis_url, redis_server.url(0), "redis")
    first, second = crew.worker().wait_ready(), None
    claim = ClaimKeys("online").claim("cache|sku(sku=1)")
    try:
        crew.send("early", 1)
        crew.ran(1)
        # The next one goes to the second worker, which parks it: what it waits for runs elsewhere.
        crew.app.control.cancel_consumer("cache", destination=[first.name], reply=True, timeout=5)
        second = crew.worker("w2").wait_ready()
        tail = crew.send("early", 2)
        with redis.Redis.from_url(redis_url) as client:
            wait_until(lambda: client.hexists(claim, "tail"), 15)
            assert second.name.encode() in client.hget(claim, "tail")
            # A worker that is killed delays its key by one lease.
            kill(first)
            crew.left()
            crew.open(2)
            assert tail.get(timeout=20) == [1, 2]
            assert crew.ran(2) == ["1", "2"]
            assert crew.meetings() == 0
            wait_until(lambda: not client.exists(claim))
    finally:
        for worker in (first, second):
            if worker is not None:
                worker.discard()
        crew.witness.close()
        crew.app.pool.force_close_all()
        redis_server.flush(0)


def test_another_broker_whose_connection_is_lost(redis_url: str, redis_server: RedisServer) -> None:
    redis_server.flush(0)
    crew = Crew(redis_url, redis_server.url(0), "redis")
    worker = crew.worker().wait_ready()
    claim = ClaimKeys("online").claim("cache|sku(sku=1)")
    try:
        crew.send("early", 1)
        crew.ran(1)
        tail = crew.send("early", 2)
        with redis.Redis.from_url(redis_url) as client:
            wait_until(lambda: client.hexists(claim, "tail"), 15)
            kill_connections(redis_server.port, int(redis_url.rpartition("/")[2]))
            worker.wait_for_log("Connection to broker lost", 15)
            # What was parked comes anew, and waits once.
            wait_until(lambda: client.hexists(claim, "tail"), 15)
            crew.open(2)
            assert tail.get(timeout=20) == [1, 2]
            wait_until(lambda: not client.exists(claim), 15)
        assert crew.ran(2) == ["1", "2"]
        assert crew.meetings() == 0
    finally:
        worker.discard()
        crew.witness.close()
        crew.app.pool.force_close_all()
        redis_server.flush(0)
