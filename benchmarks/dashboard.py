"""The time of the dashboard's pages, and their share of Redis, with many tenants and messages."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery

import celery_dq
from benchmarks.measure import Report, Series, benchmark, spending
from benchmarks.postbox import store
from celery_dq.shared_reading import FRESH_S
from celery_dq.testing.servers import RedisServer

PAGES = {
    "all queues": "",
    "a queue": "queue/?queue=q0",
    "a search for a tenant": "queue/?queue=q0&q=nowhere",
    "a tenant": "tenant/?queue=q0&tenant=t77",
    "a message": "message/?id=m77-0",
    "workers": "workers/",
}
CELERY = """
import sys
from celery_dq.cli import dq
from celery.bin.celery import celery, main
celery.commands.setdefault("dq", dq)
sys.exit(main())
"""

app: Any = Celery("benchmarks.dashboard", set_as_current=False)
app.conf.update(task_default_queue="q0", dq_default_quota={"rate": "50/s", "burst": 10})
celery_dq.setup(app)


@benchmark(
    "page | ms | Redis CPU ms",
    """
    {messages:,} waiting messages of {tenants:,} tenants in one queue; no worker
    ms: an HTTP GET on the same machine, median (min-max); Redis CPU: by INFO
    """,
)
def dashboard(report: Report, quick: bool) -> None:
    """Measure an HTTP GET of each page of ``celery dq web``, and its share of Redis."""
    tenants, messages = (2_000, 10_000) if quick else (60_000, 1_000_000)
    report.fill_in(messages=messages, tenants=tenants)
    with RedisServer() as server:
        app.conf.broker_url = server.url(scheme="dq-redis")
        store(app, "q0", ((f"t{n % tenants}", f"m{n % tenants}-{n // tenants}") for n in range(messages)))
        assert app.dq.queues["q0"].snapshot(ages=False).waiting == messages
        with _web(app.conf.broker_url) as url:
            rounds = 3 if quick else 11
            found = {name: _measure(server.port, url + path, rounds) for name, path in PAGES.items()}
    report.compare(found, "all queues", "ms | redis")


@contextmanager
def _web(broker_url: str) -> Iterator[str]:
    words = ["-A", "benchmarks.dashboard", "-b", broker_url, "dq", "web", "--port", "0", "--json"]
    process = subprocess.Popen([sys.executable, "-c", CELERY, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")["url"]
    finally:
        process.terminate()
        process.wait()


def _measure(port: int, url: str, rounds: int) -> dict[str, Series]:
    found = {"ms": Series(), "redis": Series()}
    for number in range(rounds + 1):
        time.sleep(FRESH_S + 0.1)  # until the reading before is not shared any more
        with spending(port) as spent, urllib.request.urlopen(url) as reply:
            reply.read()
        if number:  # the first one connects and loads the scripts
            found["ms"].values.append(spent.wall_s * 1e3)
            found["redis"].values.append(sum(spent.redis_s) * 1e3)
    return found
