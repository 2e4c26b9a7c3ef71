"""The time of a scrape of the metrics, and its share of Redis, by the number of tenants and queues."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from celery import Celery
from kombu import Queue

import celery_dq
from benchmarks.measure import Report, Series, benchmark, spending
from benchmarks.postbox import store
from celery_dq.metrics.server import MetricsServer
from celery_dq.shared_reading import FRESH_S
from celery_dq.testing.servers import RedisServer

TENANTS, QUICK_TENANTS = 60_000, 2_000
QUEUES, QUICK_QUEUES = 1_000, 50


@benchmark(
    "broker | scrape ms | Redis CPU ms | longest script ms | at best ms",
    """
    scrape: an HTTP GET of an exporter on the same machine, median (min-max)
    Redis CPU: by INFO; longest script: by the slow log, which counts pauses of the process too
    at best: the slowest of all scripts, each in the scrape in which it was quickest
    """,
)
def scrapes(report: Report, quick: bool) -> None:
    """Measure an HTTP GET of the metrics, and its share of Redis."""
    tenants, queues = (QUICK_TENANTS, QUICK_QUEUES) if quick else (TENANTS, QUEUES)
    cases: tuple[tuple[str, int, dict[str, Any]], ...] = (
        (f"{tenants:,} tenants", 1, {}),
        (f"{tenants:,} tenants with a rate", 1, {"dq_default_quota": {"rate": "1/m", "burst": 2}}),
        (f"{tenants:,} tenants, 20 with labels", 1, {"dq_metrics_tenants": 20}),
        (f"{queues:,} empty queues", queues, {}),
    )
    for name, queue_count, conf in cases:
        # A busy machine must not end the measurement.
        patient = {**conf, "dq_metrics_timeout": 60}
        with RedisServer() as server, _exporter(server, queue_count, patient) as (app, url):
            if queue_count == 1:
                _fill(app, tenants)
            found = {name: _measure(server.port, url, 3 if quick else 11)}
        report.compare(found, name, "scrape | redis | longest | at best")


@contextmanager
def _exporter(server: RedisServer, queues: int, conf: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    url = server.url(0).replace("redis://", "dq-redis://", 1)
    with Celery("scrapes", broker=url, set_as_current=False) as app:
        app.conf.update(task_default_queue="q0", task_queues=None, **conf)
        for number in range(queues):
            app.amqp.queues.add(Queue(f"q{number}"))
        celery_dq.setup(app)
        metrics = MetricsServer(app, "127.0.0.1", 0)
        thread = threading.Thread(target=metrics.serve)
        thread.start()
        try:
            yield app, metrics.url
        finally:
            metrics.stop()
            thread.join()


def _fill(app: Any, tenants: int) -> None:
    """Store one to three messages for each tenant, under the quota of the settings."""
    options = app.dq.options.queue("q0")
    if options.names_quota:
        app.dq.quotas.set_default("q0", rate=options.quota.rate, burst=options.quota.burst)
    messages = ((tenant, number) for tenant in range(tenants) for number in range(1 + tenant % 3))
    store(app, "q0", ((f"t{tenant}", f"m{tenant}-{number}") for tenant, number in messages))


def _measure(port: int, url: str, rounds: int) -> dict[str, Series]:
    client: Any = redis.Redis(port=port)
    client.config_set("slowlog-log-slower-than", 0)
    client.config_set("slowlog-max-len", 1_000_000)
    by_scrape: list[list[float]] = []
    found = {name: Series() for name in ("scrape", "redis", "longest")}
    for number in range(rounds + 1):
        time.sleep(FRESH_S + 0.1)  # until the reading before is too old to be used again
        client.slowlog_reset()
        with spending(port) as spent, urllib.request.urlopen(url) as reply:
            assert b"celery_dq_up 1.0" in reply.read()
        calls = client.slowlog_get(1_000_000)
        scripts = [entry["duration"] / 1e3 for entry in calls if entry["command"].startswith(b"EVAL")]
        if number:  # the first one connects and loads the scripts
            by_scrape.append(scripts)
            figures = (spent.wall_s * 1e3, sum(spent.redis_s) * 1e3, max(scripts, default=0.0))
            for series, value in zip(found.values(), figures, strict=True):
                series.values.append(value)
    # The same scripts run in each scrape, unless a tenant moves.
    at_best = [min(each) for each in zip(*by_scrape, strict=False)]
    found["at best"] = Series([max(at_best, default=0.0)])
    client.close()
    return found
