"""The cost of dedup per call, beside the same call without it, and beside the packages of others.

The peers are measured where they are installed. They lock before they publish, on the stock Redis transport.
``scripts`` is publish, claim and finish of a message by the scripts alone, in batches of one. ``worker`` is
the time from ``apply_async`` until a worker (solo pool) has run the task and the broker has removed the
message: a backlog is published, then run. Both times and both shares of Redis are added.
"""

from __future__ import annotations

import importlib
from functools import partial
from importlib.util import find_spec
from typing import Any

import redis
from celery import Celery
from kombu import pools

import celery_dq
from benchmarks.measure import Report, benchmark, dump, interleave, ratio, spending
from benchmarks.workers import app_of, publish_backlog, seconds_between_marks, settings, worker_of
from celery_dq.dedup import dedup as with_key
from celery_dq.keys import PartitionKeys
from celery_dq.testing.servers import RedisServer
from celery_dq.transport.message_record import DedupSection, MessageRecord
from celery_dq.transport.partition_replies import OutgoingRecord
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_calls import load_scripts

#: Peer -> its module, the class of a task, and the options of that.
PEERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "celery-singleton": ("celery_singleton", "Singleton", {}),
    "celery-once": ("celery_once", "QueueOnce", {"once": {"graceful": True}}),
    "celery-heimdall": (
        "celery_heimdall",
        "HeimdallTask",
        {"heimdall": {"unique": True, "unique_lock_blocking": False}},
    ),
}


@benchmark(
    "call | µs/call | vs plain | vs stock | redis µs/call",
    "calls: apply_async with no worker, a key per call unless noted; vs: round by round",
)
def dedup(report: Report, quick: bool) -> None:
    """The cost of dedup per call."""
    present = [name for name, (module, *_) in PEERS.items() if find_spec(module)]
    if missing := [name for name in PEERS if name not in present]:
        report.notes.append(f"not installed: {', '.join(missing)}")
    contenders = ["plain", "dedup", "dedup, 90 % duplicates", "stock", *present]
    rounds, amount = (3, 500) if quick else (9, 3_000)
    # One server for all contenders, because celery-singleton never closes its connection.
    with RedisServer() as server:
        found = interleave(contenders, rounds, partial(_call, server, amount), 150)
        plain, stock = (found[name]["call"] for name in ("plain", "stock"))
        for name, row in found.items():
            report.row(name, row["call"], ratio(row["call"], plain), ratio(row["call"], stock), row["cpu"])
        report.data = dump(found)
        for what, once in (("worker", _run), ("scripts", _run_scripts)):
            found = interleave(
                [f"{what}, plain", f"{what}, dedup"], rounds, partial(once, server, amount), 60
            )
            for name, row in found.items():
                against = ratio(row["call"], found[f"{what}, plain"]["call"])
                report.row(name, row["call"], against, "-", row["cpu"])
            report.data |= dump(found)


def _task(app: Celery, kind: str) -> Any:
    def refresh(sku: int) -> None: ...

    options: dict[str, Any] = {}
    if kind in PEERS:
        module, base, options = PEERS[kind]
        options = {"base": getattr(importlib.import_module(module), base), **options}
    make: Any = app.task(name="refresh", shared=False, **options)
    return make(with_key(key="{sku}")(refresh) if kind.startswith("dedup") else refresh)


def _call(server: RedisServer, amount: int, kind: str) -> dict[str, float]:
    stock = kind == "stock" or kind in PEERS
    server.flush(1)
    with Celery(
        "bench", broker=server.url(1, scheme="redis" if stock else "dq-redis"), set_as_current=False
    ) as app:
        once = {"url": app.conf.broker_url, "default_timeout": 3600}
        app.conf.update(
            task_ignore_result=True,
            task_default_queue="cache",
            singleton_backend_url=server.url(1),
            ONCE={"backend": "celery_once.backends.Redis", "settings": once},
        )
        if not stock:
            celery_dq.setup(app)
        task = _task(app, kind)
        distinct = 10 if "duplicates" in kind else 1
        for each in range(50):
            task.apply_async((each,))
        with spending(server.port) as spent:
            for each in range(amount):
                task.apply_async((50 + each // distinct,))
    pools.reset()
    return spent.per(amount)


def _run(server: RedisServer, amount: int, kind: str) -> dict[str, float]:
    server.flush(1)
    task = "keyed" if kind.endswith("dedup") else "noop"
    with RedisServer() as clock:
        url = server.url(1, scheme="dq-redis")
        conf = settings(url, clock.port, has_keyed=True, worker_prefetch_multiplier=16)
        with app_of("dq", conf) as app:
            for each in range(50):
                app.tasks[task].apply_async((-1 - each,))
            with spending(server.port) as publishing:
                publish_backlog(app, amount, task)
            with (
                spending(server.port) as running,
                worker_of("dq", conf, pool="solo", concurrency=1),
            ):
                ran_s = seconds_between_marks(clock)
        pools.reset()
    cpu_s = sum(publishing.redis_s) + sum(running.redis_s)
    return {"call": (publishing.wall_s + ran_s) / amount * 1e6, "cpu": cpu_s / amount * 1e6}


def _run_scripts(server: RedisServer, amount: int, kind: str) -> dict[str, float]:
    keyed = kind.endswith("dedup")
    server.flush(1)
    with redis.Redis.from_url(server.url(1), socket_timeout=None) as client:
        partition = Partition(PartitionKeys("online", "cache"), load_scripts())

        def live(number: int) -> None:
            section = DedupSection(f"refresh(sku={number})").pack() if keyed else b""
            record = MessageRecord("", "refresh", 0, 0, 0, b"{}", "[]", section).pack()
            partition.push([OutgoingRecord(number, f"m{number}", record)], producer="p").run(client)
            (entry,) = partition.claim("c", lease_ms=60_000, want=1).run(client).entries
            partition.ack("c", finish=[entry.tag]).run(client)

        for number in range(1, 51):
            live(number)
        with spending(server.port) as spent:
            for number in range(51, 51 + amount):
                live(number)
    return spent.per(amount)
