"""The metrics of the queues, read by HTTP."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from kombu.exceptions import OperationalError
from prometheus_client import CollectorRegistry

from celery_dq.errors import QueueFull
from celery_dq.inspector.queue_counters import WAIT_BOUNDS_S
from celery_dq.metrics.collector import DQCollector
from celery_dq.metrics.table import METRICS
from celery_dq.testing.waiting import wait_until
from tests.integration.shop import claim, dead_letter, send
from tests.metrics.conftest import MakeApp, Serve, scrape


def test_a_queue_in_numbers(make_app: MakeApp, serve: Serve) -> None:
    app = make_app()
    dead_letter(app)
    send(app, "a", "a", "b", "c")
    send(app, "a", countdown=3600)
    claim(app, 1)
    app.dq.quotas.set("push", "b", paused=True)
    metrics = scrape(serve(app))
    now = app.dq.queues["push"].snapshot()
    assert metrics("celery_dq_up") == 1
    assert metrics.of("celery_dq_queue_messages") == {
        ("push", "waiting"): now.waiting,
        ("push", "delayed"): 1,
        ("push", "held"): 1,
        ("push", "discards"): now.discards,
        ("push", "dead"): 1,
    }
    assert now.waiting == 3
    assert metrics("celery_dq_queue_runnable_messages", queue="push") == 2 + now.discards
    assert metrics.of("celery_dq_queue_tenants") == {
        ("push", "eligible"): 2,
        ("push", "throttled"): 0,
        ("push", "at_concurrency"): 0,
        ("push", "paused"): 1,
    }
    assert metrics("celery_dq_queue_consumers", queue="push") == 1
    age = metrics("celery_dq_queue_oldest_waiting_age_seconds", queue="push")
    assert now.oldest_waiting_s is not None
    assert 0 < age < now.oldest_waiting_s
    assert metrics("celery_queue_length", queue_name="push") == 3
    assert metrics("celery_active_consumer_count", queue_name="push") == 1


def test_a_paused_queue_is_marked_and_needs_no_worker(make_app: MakeApp, serve: Serve) -> None:
    app = make_app()
    send(app, "a", "a")
    app.tasks["notify"].apply_async(("a",), queue="mail")
    app.dq.queues["push"].pause()
    metrics = scrape(serve(app))
    assert metrics.of("celery_dq_queue_paused") == {("push",): 1, ("mail",): 0}
    assert metrics.of("celery_dq_queue_runnable_messages") == {("push",): 0, ("mail",): 1}


def test_an_expired_lease_is_no_consumer(make_app: MakeApp, serve: Serve) -> None:
    app = make_app()
    with app.dq._broker.open_home("push") as (partition, client):
        partition.claim("worker:1", lease_ms=60_000, want=0).run(client)
        client.zadd(partition.keys.leases, {"worker:1": 1})
    metrics = scrape(serve(app))
    assert metrics("celery_dq_queue_consumers", queue="push") == 0
    assert metrics("celery_active_consumer_count", queue_name="push") == 0


def test_counters_of_the_broker_are_counters_of_every_process(make_app: MakeApp, serve: Serve) -> None:
    app = make_app()
    send(app, *"abcd")
    for entry in claim(app, 2):
        with app.dq._broker.open_home("push") as (partition, client):
            for _ in range(2):
                partition.ack("worker:1", finish=[entry.tag]).run(client)
    app.dq.queues["push"].cancel_tenant("d")
    found = [scrape(serve(each)) for each in (app, make_app())]
    for metrics in found:
        assert metrics("celery_dq_messages_published_total", queue="push") == 4
        assert metrics("celery_dq_messages_claimed_total", queue="push") == 2
        assert metrics("celery_dq_messages_finished_total", queue="push") == 2
        assert metrics("celery_dq_messages_cancelled_total", queue="push") == 1
        assert metrics("celery_dq_stale_acks_total", queue="push") == 2
        assert metrics.kinds["celery_dq_messages_published"] == "counter"


def test_calls_of_full_tenants_are_counted(make_app: MakeApp, serve: Serve) -> None:
    app = make_app()
    app.dq.quotas.set("push", "refused", max_waiting=1)
    app.dq.quotas.set("push", "dropped", max_waiting=1, when_full="discard")
    send(app, "refused", "dropped", "dropped", "dropped")
    for _ in range(3):
        with pytest.raises(QueueFull):
            send(app, "refused")
    metrics = scrape(serve(app))
    assert metrics("celery_dq_messages_refused_full_total", queue="push") == 3
    assert metrics("celery_dq_messages_overflowed_total", queue="push") == 2
    assert metrics("celery_dq_queue_messages", queue="push", state="waiting") == 2
    assert metrics("celery_dq_queue_messages", queue="push", state="discards") == 2


def test_waiting_times_are_a_histogram_of_quiet_and_noisy_tenants(make_app: MakeApp, serve: Serve) -> None:
    app = make_app()
    send(app, "quiet", "noisy", "noisy", "noisy")
    claim(app, 4)
    metrics = scrape(serve(app))
    counters = app.dq.queues["push"].snapshot().counters
    for group, waits in (("quiet", counters.waits_alone), ("noisy", counters.waits_in_line)):
        labels = {"queue": "push", "class": group}
        name = "celery_dq_queue_wait_seconds"
        assert metrics(f"{name}_count", **labels) == waits.count == {"quiet": 1, "noisy": 3}[group]
        assert metrics(f"{name}_sum", **labels) == pytest.approx(waits.sum_s)
        for bound, count in zip(WAIT_BOUNDS_S, accumulate(waits.buckets), strict=True):
            le = "+Inf" if bound == float("inf") else str(bound)
            assert metrics(f"{name}_bucket", le=le, **labels) == count


def test_verdicts_of_dedup_are_counted(make_app: MakeApp, serve: Serve) -> None:
    app = make_app()
    for _ in range(3):
        app.tasks["notify"].apply_async(("a",), dedup={"key": "k"})
    assert scrape(serve(app)).of("celery_dq_dedup_verdicts_total") == {
        ("push", "accept"): 1,
        ("push", "decline"): 2,
    }


def test_no_tenant_has_a_label_unless_it_is_asked_for(make_app: MakeApp, serve: Serve) -> None:
    app = make_app()
    send(app, "merchant-42")
    metrics = scrape(serve(app))
    assert not [labels for _, labels in metrics.samples if "tenant" in dict(labels)]


def test_the_largest_backlogs_have_labels_and_idle_tenants_leave(make_app: MakeApp, serve: Serve) -> None:
    app = make_app(dq_metrics_tenants=2)
    app.dq.quotas.set("push", "slow", rate="1/d")
    send(app, "slow")
    claim(app)
    # A tenant may have the name that stands for all others.
    send(app, *["__other__"] * 6, *["big"] * 5, *["slow"] * 4, *["small"] * 2, "tiny")
    app.tasks["notify"].apply_async(("elsewhere",), queue="mail")
    url = serve(app)
    metrics = scrape(url)
    assert metrics.of("celery_dq_tenant_backlog_messages") == {
        ("push", "big"): 5,
        ("push", "slow"): 4,
        ("push", "__other__"): 6 + 2 + 1,
        ("mail", "__other__"): 1,
    }
    throttled = {("push", "big"): 0, ("push", "slow"): 1}
    assert metrics.of("celery_dq_tenant_throttled") == throttled
    ages = metrics.of("celery_dq_tenant_oldest_waiting_age_seconds")
    assert ages.keys() == throttled.keys()
    assert 0 < ages["push", "big"] < 60
    app.dq.queues["push"].purge()
    wait_until(
        lambda: (
            scrape(url).of("celery_dq_tenant_backlog_messages")
            == {("push", "__other__"): 0, ("mail", "elsewhere"): 1, ("mail", "__other__"): 0}
        ),
        30,
    )


def test_strange_names_do_not_spoil_the_answer(make_app: MakeApp, serve: Serve) -> None:
    app = make_app(dq_metrics_tenants=5)
    queue = 'quoted-"\n'
    with app.dq._broker.open_home(queue) as (partition, client):
        client.sadd(app.dq._broker._registry, queue, b"not-\xff")
        client.hset(partition.keys.messages, "id", b"")
        client.zadd(partition.keys.turn, {b"strange-\xff": 1})
        client.hset(partition.keys.single, b"strange-\xff", b"12345678id")
    tenants = scrape(serve(app)).of("celery_dq_tenant_backlog_messages")
    assert tenants[queue, "strange-\\xff"] == 1


def test_leaders_have_a_token_and_their_absence_shows(make_app: MakeApp, serve: Serve) -> None:
    app = make_app(dq_singleton_queues=["ledger"])
    url = serve(app)
    assert scrape(url)("celery_dq_leader_present", leadership="ledger") == 0
    assert scrape(url).of("celery_dq_leader_token") == {}
    with app.dq.leaders._elections() as elections:
        election = elections.candidate("ledger")
        election.become_candidate()
        won = election.accept(6, 0)
        wait_until(lambda: scrape(url)("celery_dq_leader_present", leadership="ledger") == 1, 30)
        metrics = scrape(url)
        assert metrics("celery_dq_leader_token", leadership="ledger") == won.token == 7
        assert metrics("celery_dq_leader_candidates", leadership="ledger") == 1


def test_the_buffer_and_its_files_without_a_broker(tmp_path: Path, make_app: MakeApp, serve: Serve) -> None:
    app = make_app("dq-redis://127.0.0.1:1/0", dq_buffer=True, dq_buffer_folder=str(tmp_path))
    url = serve(app)
    assert scrape(url).of("celery_dq_spill_bytes") == {(): 0}
    try:
        for _ in range(3):
            app.send_task("job")
        wait_until(lambda: scrape(url)("celery_dq_buffer_messages") == 3, 30)
        metrics = scrape(url)
        assert metrics("celery_dq_up") == 0
        assert metrics("celery_dq_buffer_degraded") == 0
        (file,) = tmp_path.rglob("*.seg*")
        assert metrics("celery_dq_spill_bytes") == file.stat().st_size
        assert metrics("celery_dq_spill_oldest_age_seconds") < 60
        assert metrics("celery_dq_buffer_oldest_age_seconds") > 0
        long_ago = (datetime.now(timezone.utc) - timedelta(hours=1)).timestamp()
        os.utime(file, (long_ago, long_ago))
        wait_until(lambda: scrape(url)("celery_dq_spill_oldest_age_seconds") > 3500, 30)
    finally:
        app.dq.buffer.close(0)


def test_an_open_circuit_breaker_shows(make_app: MakeApp, serve: Serve) -> None:
    app = make_app("dq-redis://127.0.0.1:1/0", dq_breaker_failures=1, dq_metrics_timeout=1)
    url = serve(app)
    assert scrape(url)("celery_dq_breaker_open") == 0
    with pytest.raises(OperationalError):
        app.send_task("job")
    # No call closes it, so it stays open longer than its pause.
    wait_until(lambda: scrape(url)("celery_dq_breaker_open") == 1, 30)
    assert app.dq.circuit() in ("open", "half-open")


def test_another_broker_has_metrics_of_the_buffer_only(
    tmp_path: Path, make_app: MakeApp, serve: Serve
) -> None:
    metrics = scrape(serve(make_app("memory://", dq_buffer_folder=str(tmp_path))))
    assert metrics.of("celery_dq_up") == {}
    assert metrics("celery_dq_buffer_messages") == 0


def test_queues_in_zookeeper_have_the_counts_that_are_known(
    hosts: str, make_app: MakeApp, serve: Serve
) -> None:
    app = make_app(f"dq-zookeeper://{hosts}")
    app.send_task("job")
    metrics = scrape(serve(app))
    assert metrics("celery_dq_up") == 1
    states = {"waiting": 1, "delayed": 0, "held": 0, "dead": 0}
    assert metrics.of("celery_dq_queue_messages") == {("push", name): count for name, count in states.items()}
    assert metrics.of("celery_dq_queue_consumers") == {}


def test_a_registry_of_the_program_asks_no_broker_until_it_is_read(make_app: MakeApp) -> None:
    app, registry = make_app("dq-redis://127.0.0.1:1/0"), CollectorRegistry(auto_describe=True)
    registry.register(DQCollector(app))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(DQCollector(app))
    assert registry.get_sample_value("celery_dq_up") == 0


def test_every_metric_of_the_table_is_served(tmp_path: Path, make_app: MakeApp, serve: Serve) -> None:
    conf: dict[str, Any] = {
        "dq_metrics_tenants": 1,
        "dq_singleton_queues": ["ledger"],
        "dq_buffer_folder": str(tmp_path),
    }
    app = make_app(**conf)
    app.tasks["notify"].apply_async(("a",), dedup={"key": "k"})
    with app.dq.leaders._elections() as elections:
        election = elections.candidate("ledger")
        election.become_candidate()
        election.accept(0, 0)
        metrics = scrape(serve(app))
    # The tests of a worker and of an outbox have the others.
    served = [metric for metric in METRICS if metric.subject not in ("worker", "outbox")]
    known = {metric.name.removesuffix("_total"): metric.kind for metric in served}
    assert metrics.kinds == known
    assert len(known) == len(served)
