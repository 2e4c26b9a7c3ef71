"""Dedup between worker processes on brokers that give no verdicts: stock Redis, and RabbitMQ."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery.exceptions import TimeLimitExceeded

from celery_dq.errors import DeliveriesExhausted
from celery_dq.keys import DedupKeys
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.conformance.kombu_queue import kill_connections
from tests.dedup.dedup_workers import DedupWorkers, kill
from tests.workers import WorkerProcess


class Company:
    """Workers on one queue, and the dedup lock of the key on which they work."""

    def __init__(self, dedup_workers: DedupWorkers, backend_url: str) -> None:
        self.dedup_workers = dedup_workers
        self.client: Any = redis.Redis.from_url(backend_url)
        self.claim = DedupKeys("online").dedup_lock(f"{dedup_workers.app.conf.task_default_queue}|sku(sku=1)")
        self.workers = dedup_workers.workers

    def worker(self, pool: str = "prefork") -> WorkerProcess:
        return self.dedup_workers.worker(f"w{len(self.workers)}", pool)

    @property
    def by_zookeeper(self) -> bool:
        return str(self.dedup_workers.conf["broker_url"]).startswith("dq-zookeeper")

    def waits(self, place: str, worker: WorkerProcess | None = None) -> None:
        """Wait until a call of this worker, or of any, has this place."""
        owner = b"" if worker is None else worker.name.encode()
        wait_until(lambda: owner in (self.client.hget(self.claim, place) or b"-"), 40, what=self.logs)

    def two_at_work(self, task: str) -> tuple[WorkerProcess, WorkerProcess, Any]:
        """Start a worker that runs version 1, and one in which version 2 waits; also return 2's result.

        The first worker gets no more messages, so version 2 and all later calls go to the second one.
        """
        first = self.worker().wait_ready()
        self.dedup_workers.send(task, 1)
        self.dedup_workers.ran(1)
        self.silence(first)
        second = self.worker().wait_ready()
        tail = self.dedup_workers.send(task, 2)
        self.waits("tail", second)
        return first, second, tail

    def busy_worker(self) -> tuple[WorkerProcess, list[str]]:
        """Start a worker, each of whose processes runs a call; also return the keys of these calls."""
        worker = self.worker().wait_ready()
        keys = [f"other-{child.pid}" for child in worker.children()]
        assert keys
        for key in keys:
            self.dedup_workers.app.tasks["early"].apply_async((key, 0))
        self.dedup_workers.ran(len(keys))
        return worker, keys

    def open(self, keys: list[str]) -> None:
        for key in keys:
            self.dedup_workers.witness.rpush(f"door:{key}", "go")

    def gone(self) -> None:
        wait_until(lambda: not self.client.exists(self.claim), 40)

    def logs(self) -> str:
        return "\n".join(worker.log for worker in self.workers)

    def silence(self, worker: WorkerProcess) -> None:
        """Let this worker consume no more, so that later messages go to other workers."""
        queue = self.dedup_workers.app.conf.task_default_queue
        self.dedup_workers.app.control.cancel_consumer(
            queue, destination=[worker.name], reply=True, timeout=20, limit=1
        )

    def close(self) -> None:
        self.dedup_workers.dismiss()
        with self.dedup_workers.app.connection_for_write() as connection:
            connection.default_channel.queue_delete(self.dedup_workers.app.conf.task_default_queue)
        self.client.close()
        self.dedup_workers.close()


@pytest.fixture(params=["redis", "amqp"])
def company(request: pytest.FixtureRequest, redis_url: str, redis_server: RedisServer) -> Iterator[Company]:
    redis_server.flush(0)
    if request.param == "dq-zookeeper":
        url = f"dq-zookeeper://{request.getfixturevalue('hosts')}"
    else:
        url = redis_url if request.param == "redis" else request.getfixturevalue("rabbitmq_server").url()
    company = Company(
        DedupWorkers(url, redis_url, redis_server.url(0), f"cache-{uuid.uuid4().hex}"), redis_url
    )
    yield company
    company.close()
    redis_server.flush(0)


def test_two_workers_share_the_keys(company: Company) -> None:
    dedup_workers = company.dedup_workers
    for worker in [company.worker(), company.worker()]:
        worker.wait_ready()
    results = [dedup_workers.send("early", version) for version in range(6)]
    dedup_workers.ran(1)
    # One call runs, one waits, and the other four are covered.
    wait_until(lambda: company.logs().count("was declined") >= 4, 40, what=company.logs)
    dedup_workers.open(2)
    values = [result.get(timeout=60) for result in results]
    ran = [int(version) for version, _, _ in dedup_workers.runs()]
    assert len(ran) == 2
    # Each call has the result of a run: its own, or that of its covering call.
    assert [each for each in values if each[0] != 1 or each[1] not in ran] == []
    assert dedup_workers.meetings() == 0
    company.gone()


def test_a_killed_worker_delays_its_key_by_one_lease(company: Company) -> None:
    dedup_workers = company.dedup_workers
    # The second call waits for a run in another worker.
    first, _, tail = company.two_at_work("early")
    kill(first)
    dedup_workers.left()
    dedup_workers.open(2)
    assert tail.get(timeout=60) == [1, 2]
    assert dedup_workers.ran(2) == ["1", "2"]
    assert dedup_workers.meetings() == 0
    company.gone()


@pytest.mark.parametrize("company", ["redis"], indirect=True)
def test_a_task_that_is_revoked_while_it_has_its_key_and_waits_for_a_process_gives_it_back(
    company: Company,
) -> None:
    dedup_workers = company.dedup_workers
    worker, others = company.busy_worker()
    revoked = dedup_workers.send("early", 1)
    company.waits("head", worker)
    assert dedup_workers.app.control.revoke(revoked.id, destination=[worker.name], reply=True, timeout=40)
    company.open(others)
    wait_until(lambda: revoked.state == "REVOKED", 40, what=company.logs)
    # The key is free, although leases are renewed as long as a call holds the key.
    dedup_workers.open()
    assert dedup_workers.send("early", 2).get(timeout=60) == [1, 2]
    company.gone()


@pytest.mark.parametrize("company", ["redis"], indirect=True)
def test_a_task_that_has_its_key_and_waits_for_a_process_gives_it_back_with_the_connection(
    company: Company, redis_server: RedisServer, redis_url: str
) -> None:
    dedup_workers = company.dedup_workers
    worker, others = company.busy_worker()
    result = dedup_workers.send("early", 1)
    company.waits("head", worker)
    kill_connections(redis_server.port, int(redis_url.rpartition("/")[2]))
    worker.wait_for_log("Connection to broker lost", 40)
    company.open(others)
    # The message is delivered again, and its first delivery never ends.
    dedup_workers.open()
    assert result.get(timeout=60) == [1, 1]
    company.gone()


@pytest.mark.parametrize("company", ["redis"], indirect=True)
def test_a_run_that_a_time_limit_ends_reports_no_lost_lock(company: Company) -> None:
    dedup_workers = company.dedup_workers
    company.worker().wait_ready()
    with pytest.raises(TimeLimitExceeded):
        dedup_workers.send("early", 1, time_limit=1).get(timeout=60)
    dedup_workers.left()
    company.gone()
    # The worker has read both reports of the end before it gets the result of another run.
    assert dedup_workers.send("limited", 2).get(timeout=60) == [1, 2]
    assert "lost its dedup lock" not in company.logs()


@pytest.mark.parametrize("company", ["dq-zookeeper"], indirect=True)
def test_a_lost_child_counts_as_a_delivery_of_a_task_with_a_key(company: Company) -> None:
    dedup_workers = company.dedup_workers
    dedup_workers.conf.update(task_reject_on_worker_lost=True, dq_max_deliveries=1)
    worker = company.worker().wait_ready()
    result = dedup_workers.send("late", 1)
    dedup_workers.ran(1)
    dedup_workers.left()
    for child in worker.children():
        child.kill()
    with pytest.raises(DeliveriesExhausted):
        result.get(timeout=60)
    assert len(dedup_workers.runs()) == 1


@pytest.mark.parametrize("company", ["amqp"], indirect=True)
def test_a_killed_worker_whose_task_comes_back(company: Company) -> None:
    dedup_workers = company.dedup_workers
    # The second call waits for a run in another worker.
    first, _, tail = company.two_at_work("late")
    kill(first)
    dedup_workers.left()
    # RabbitMQ delivers it again at once: it takes the place of the lost delivery, ahead of the tail.
    assert dedup_workers.ran(2) == ["1", "1"]
    dedup_workers.open(3)
    assert tail.get(timeout=60) == [1, 2]
    assert dedup_workers.ran(3) == ["1", "1", "2"]
    assert dedup_workers.meetings() == 0
    company.gone()


@pytest.mark.parametrize("company", ["amqp"], indirect=True)
def test_a_waiting_call_of_a_killed_worker_comes_back(company: Company) -> None:
    dedup_workers = company.dedup_workers
    _, second, tail = company.two_at_work("early")
    third = company.worker().wait_ready()
    kill(second)
    # RabbitMQ delivers it again at once, long before its lease is over: it has its old place, and is not
    # declined in favour of the dead delivery.
    company.waits("tail", third)
    dedup_workers.open(2)
    assert tail.get(timeout=60) == [1, 2]
    assert dedup_workers.ran(2) == ["1", "2"]
    company.gone()


@pytest.mark.parametrize("company", ["amqp", "dq-zookeeper"], indirect=True)
@pytest.mark.parametrize("task", ["early", "late"])
def test_a_declined_call_of_a_killed_worker_is_declined_again(company: Company, task: str) -> None:
    dedup_workers = company.dedup_workers
    dedup_workers.conf["broker_transport_options"] = {"session_timeout": 4} if company.by_zookeeper else {}
    first = company.worker().wait_ready()
    dedup_workers.send(task, 1)
    dedup_workers.ran(1)
    tail = dedup_workers.send(task, 2)
    company.waits("tail")
    declined = [dedup_workers.send(task, version) for version in (3, 4, 5)]
    wait_until(lambda: company.logs().count("was declined") == 3, 40, what=company.logs)
    kill(first)
    dedup_workers.left()
    # Each run is over before the next message is delivered, so no call is left that would cover it.
    dedup_workers.open(5)
    company.worker().wait_ready()
    assert [each.get(timeout=60) for each in (tail, *declined)] == [[1, 2]] * 4
    # No call waits.
    company.gone()
    assert sorted(dedup_workers.ran(2)) == (["1", "2"] if task == "early" else ["1", "1", "2"])
    wait_until(lambda: company.client.keys("*declined:*") == [], 40)


def test_a_waiting_call_survives_a_lost_connection(
    company: Company, redis_url: str, request: pytest.FixtureRequest
) -> None:
    dedup_workers = company.dedup_workers
    worker = company.worker().wait_ready()
    dedup_workers.send("early", 1)
    dedup_workers.ran(1)
    tail = dedup_workers.send("early", 2)
    company.waits("tail")
    if str(dedup_workers.conf["broker_url"]).startswith("amqp"):
        request.getfixturevalue("rabbitmq_server").control("close_all_connections", "by the test")
    else:
        server: RedisServer = request.getfixturevalue("redis_server")
        kill_connections(server.port, int(redis_url.rpartition("/")[2]))
    worker.wait_for_log("Connection to broker lost", 40)
    # The waiting message is delivered again, and waits only once.
    company.waits("tail")
    dedup_workers.open(2)
    assert tail.get(timeout=60) == [1, 2]
    company.gone()
    assert dedup_workers.ran(2) == ["1", "2"]
    assert dedup_workers.meetings() == 0
