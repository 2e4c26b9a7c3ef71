"""``celery dq status``: what it shows, and its exit status."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from celery import Celery

import celery_dq
from celery_dq.beat.scheduler import leadership, schedule_name
from celery_dq.keys import PartitionKeys
from celery_dq.leadership.redis_election import RedisElection
from celery_dq.testing.processes import dead_port
from celery_dq.testing.waiting import wait_until
from tests.dq_command import run_dq
from tests.integration.shop import dead_letter, send
from tests.workers import WorkerProcess

Status = Callable[..., str]


def status_of(app: Any, *words: str, status: int = 0) -> str:
    return run_dq(app, "status", *words, status=status).output


@pytest.fixture
def status(shop: Any) -> Status:
    return partial(status_of, shop)


def test_messages_with_and_without_a_worker(status: Status, shop: Any) -> None:
    assert "OK " in status()
    shop.tasks["notify"].delay("acme")
    text = status(status=1)
    assert "WARNING Messages wait in 'push' (1), and no living worker consumes it." in text
    with shop.dq._broker.open_home("push") as (partition, client):
        partition.claim("w", lease_ms=60_000, want=0).run(client)
        assert "living consumers: 1" in status()
        # The same process, as the leader of a singleton queue.
        shop.tasks["notify"].apply_async(("acme",), queue="ledger")
        with shop.dq._broker.open_home("ledger") as (led, _):
            led.fence(1).run(client)
            led.claim("w@1", lease_ms=60_000, want=0).run(client)
            assert len(client.zrange(led.keys.leases, 0, -1)) == 1
            assert "queues: 2, living consumers: 1" in status()
            led.claim("w@1", lease_ms=1, want=0).run(client)
        partition.claim("w", lease_ms=1, want=0).run(client)
        while client.zscore(partition.keys.leases, "w") > int(client.time()[0]) * 1e6 + client.time()[1]:
            pass
    assert "living consumers: 0" in status(status=1)


@pytest.mark.parametrize("consumer", ["move:other:", "migration:5f0e"])
def test_an_interrupted_move_is_no_worker_in_any_view(status: Status, shop: Any, consumer: str) -> None:
    taken, waits = send(shop, "acme", "acme")
    with shop.dq._broker.open_home("push") as (partition, client):
        partition.take(consumer, [taken], lease_ms=60_000).run(client)
    assert "Messages wait in 'push' (1), and no living worker consumes it." in (text := status(status=1))
    assert "living consumers: 0" in text
    found = shop.dq.queues["push"].snapshot()
    assert (found.living_consumers, found.health) == (0, "no-worker")
    assert [each.name for each in found.consumers] == [consumer], "it is shown where all leases are"
    assert shop.dq.explain(task_id=waits).reason == "no-worker"
    assert shop.dq.workers() == []
    assert "workers 0 " in run_dq(shop, "top", "--once", status=None).output


def test_one_worker_is_one_worker_in_every_view(broker_url: str, shop: Any) -> None:
    conf = {"broker_url": broker_url, "dq_singleton_queues": ["ledger"]}
    shop.conf.dq_singleton_queues = ["ledger"]

    def output(*words: str) -> str:
        return run_dq(shop, *words, status=None).output

    queues = ("push", "ledger", "late")
    with WorkerProcess(
        "tests.migration.worker_app", broker=None, conf=conf, queues=queues, preloaded=True
    ) as run:
        wait_until(lambda: [each.state for each in shop.dq.leaders()] == ["leads"])
        wait_until(lambda: [each.queues for each in shop.dq.workers()] == [tuple(sorted(queues))])
        (worker,) = shop.dq.workers()
        assert (worker.name, worker.state) == ("w1@proof", "alive")
        assert re.fullmatch(rf"w1@proof:{run.pid}:[0-9a-f]{{12}}", worker.consumer)
        assert output("workers").splitlines()[1].startswith("w1@proof  alive  ")
        assert "living consumers: 1" in output("status")
        assert "workers 1 " in output("top", "--once")
        assert [each["name"] for each in json.loads(output("status", "--json"))["workers"]] == ["w1@proof"]
        assert [each.leader.split(":")[0] for each in shop.dq.leaders()] == ["w1@proof"]


def test_delayed_messages_without_a_worker(status: Status, shop: Any) -> None:
    shop.tasks["notify"].apply_async(("acme",), countdown=3600)
    assert "Messages wait in 'push' (1), and no living worker consumes it." in status(status=1)


def test_dead_letters(status: Status, shop: Any) -> None:
    dead_letter(shop, "acme")
    found = json.loads(status("--json", status=1))
    assert [each["code"] for each in found["findings"]] == ["W020"]
    assert [each["dead"] for each in found["queues"]] == [1]
    assert "celery dq dead list push" in status(status=1)


def test_a_singleton_queue_without_a_leader(status: Status, shop: Any) -> None:
    shop.conf.dq_singleton_queues = ["push"]
    assert "No worker leads singleton queue 'push'. Start a worker with -Q push. (W021)" in status(status=1)
    shop.tasks["notify"].delay("acme")
    text = status(status=1)
    assert "no worker leads this singleton queue. Start a worker with -Q push. (W018)" in text
    assert "W021" not in text


def test_a_beat_without_a_leader(status: Status, shop: Any) -> None:
    shop.conf.dq_queues = {"old": {}}
    name = leadership(schedule_name(shop, shop.dq.options))
    with shop.dq._broker.channel() as channel:
        beat, other = (
            RedisElection(channel.client, PartitionKeys("online", each), "beat-1") for each in (name, "old")
        )
        beat.accept(0, 1.0)
        assert "OK " in status()
        beat.resign(True)
        other.accept(0, 1.0)
        other.resign(True)
    text = status(status=1)
    assert f"WARNING No process leads {name!r}: no tick is sent. Start 'celery beat -S dq'. (W021)" in text
    assert text.count("W021") == 1  # the queue is not a singleton queue any more


def test_a_wrong_setting_is_shown() -> None:
    with Celery("shop", broker="memory://") as app:
        app.conf.update(dq_singleton_queues=["push"])
        celery_dq.setup(app)
        assert "ERROR   dq_singleton_queues names 'push', and nothing can elect a leader" in status_of(
            app, status=2
        )


def test_a_server_that_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hung:
        url = f"dq-redis://127.0.0.1:{hung.getsockname()[1]}/0"
        with Celery("shop", broker=url) as app:
            celery_dq.setup(app)
            app.conf.task_publish_retry_policy = {"max_retries": 0}
            text = status_of(app, "--timeout", "0.2", status=2)
    assert "ERROR   The broker did not answer within 0.2 s." in text
    assert "(E022)" in text


@pytest.mark.parametrize("conf", [{}, {"dq_leese": 5}])
def test_nothing_can_be_read(conf: dict[str, Any]) -> None:
    with dead_port() as port, Celery("shop", broker=f"dq-redis://127.0.0.1:{port}/0") as app:
        app.conf.update(task_publish_retry_policy={"max_retries": 0}, **conf)
        celery_dq.setup(app)
        text = status_of(app, status=2)
        assert text.count("Connection refused. Start it, or mend broker_url. (E011)") == (not conf)
        assert ("dq_leese" if conf else "cannot be reached") in text
        assert text.startswith("ERROR" if conf else "Broker dq-redis://")
        assert "ERROR" in text
        assert "queues: " not in text
