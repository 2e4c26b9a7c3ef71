"""The cost of dedup per call, beside the same call without it, and beside the packages of others.

The peers are measured where they are installed. They lock before they publish, on the stock Redis transport.
``scripts`` is publish, claim and finish of a message by the scripts alone, in batches of one. ``worker`` is
the time from ``apply_async`` until a worker (solo pool) has run the task and the broker has removed the
message: a backlog is published, then run. Both times and both shares of Redis are added.
"""

from __future__ import annotations

import importlib
import time
from functools import partial
from typing import Any

import redis
from celery import Celery
from kombu import pools

import celery_dq
from benchmarks.keyed import NAME, add_tasks, conf
from benchmarks.measure import Report, ServerProbe, dump, interleave, ratio
from celery_dq.dedup import dedup
from celery_dq.keys import PartitionKeys
from celery_dq.testing.servers import RedisServer
from celery_dq.transport.message_record import DedupSection, MessageRecord
from celery_dq.transport.partition_replies import OutgoingRecord
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_calls import load_scripts
from tests.brokers import BROKERS
from tests.workers import WorkerProcess, make_app

PEERS = {
    "celery-singleton": "celery_singleton",
    "celery-once": "celery_once",
    "celery-heimdall": "celery_heimdall",
}


def dedup_cost(quick: bool) -> Report:
    """The cost of dedup per call."""
    report = Report("dedup")
    # One server for all contenders, because celery-singleton never closes its connection.
    with RedisServer() as server:
        return _measured(report, server, quick)


def _measured(report: Report, server: RedisServer, quick: bool) -> Report:
    contenders = ["plain", "dedup", "dedup, 90 % duplicates", "stock", *filter(_installed, PEERS)]
    report.header = ["call", "µs/call", "vs plain", "vs stock", "redis µs/call"]
    found = interleave(contenders, 3 if quick else 9, partial(_calls, server, 500 if quick else 3_000), 150)
    plain, stock = (found[name]["call"] for name in ("plain", "stock"))
    for name in contenders:
        row = found[name]
        report.row(name, row["call"], ratio(row["call"], plain), ratio(row["call"], stock), row["cpu"])
    lives = {}
    for what, once in (("worker", _worked), ("scripts", _lives)):
        rounds, amount = (3, 500) if quick else (9, 3_000)
        life = interleave([f"{what}, plain", f"{what}, dedup"], rounds, partial(once, server, amount), 60)
        for name, row in life.items():
            report.row(name, row["call"], ratio(row["call"], life[f"{what}, plain"]["call"]), "-", row["cpu"])
        lives.update(life)
    report.notes.append("calls: apply_async with no worker, a key per call unless noted; vs: round by round")
    missing = [name for name in PEERS if not _installed(name)]
    if missing:
        report.notes.append(f"not installed: {', '.join(missing)}")
    report.data = dump({**found, **lives})
    return report


def _installed(peer: str) -> bool:
    try:
        importlib.import_module(PEERS[peer])
    except ImportError:
        return False
    return True


def _task(app: Celery, kind: str) -> Any:
    if kind == "celery-singleton":
        base = importlib.import_module(PEERS[kind]).Singleton

        @app.task(base=base, name="refresh", shared=False)
        def singleton(sku: int) -> None: ...

        return singleton
    if kind == "celery-once":
        module = importlib.import_module(PEERS[kind])
        app.conf.ONCE = {
            "backend": "celery_once.backends.Redis",
            "settings": {"url": app.conf.broker_url, "default_timeout": 3600},
        }

        @app.task(base=module.QueueOnce, name="refresh", shared=False, once={"graceful": True})
        def once(sku: int) -> None: ...

        return once

    if kind == "celery-heimdall":
        module = importlib.import_module(PEERS[kind])
        unique = {"unique": True, "unique_lock_blocking": False}

        @app.task(base=module.HeimdallTask, name="refresh", shared=False, heimdall=unique)
        def heimdall(sku: int) -> None: ...

        return heimdall

    def refresh(sku: int) -> None: ...

    return app.task(name="refresh", shared=False)(
        dedup(key="{sku}")(refresh) if kind.startswith("dedup") else refresh
    )


def _calls(server: RedisServer, amount: int, kind: str) -> dict[str, float]:
    stock = kind == "stock" or kind in PEERS
    server.flush(1)
    app = Celery("bench", broker=server.url(1, scheme="redis" if stock else "dq-redis"), set_as_current=False)
    app.conf.update(task_ignore_result=True, task_default_queue="cache", singleton_backend_url=server.url(1))
    if not stock:
        celery_dq.setup(app)
    task = _task(app, kind)
    distinct = 10 if "duplicates" in kind else 1
    for each in range(50):
        task.apply_async((each,))
    probe = ServerProbe(server.port)
    cpu, started = probe.cpu_seconds(), time.perf_counter()
    for each in range(amount):
        task.apply_async((50 + each // distinct,))
    taken, cpu = time.perf_counter() - started, probe.cpu_seconds() - cpu
    probe.close()
    app.close()
    pools.reset()
    return {"call": taken / amount * 1e6, "cpu": cpu / amount * 1e6}


def _worked(server: RedisServer, amount: int, kind: str) -> dict[str, float]:
    server.flush(1)
    broker = BROKERS["dq"]
    with RedisServer() as clock:
        settings = conf(server.url(1, scheme="dq-redis"), clock.port)
        app = add_tasks(make_app(NAME, broker, settings))
        task, mark = app.tasks[kind.partition(", ")[2]], app.tasks["mark"]
        mark.apply_async(("begin",))
        for each in range(50):
            task.apply_async((each,))
        probe = ServerProbe(server.port)
        cpu, started = probe.cpu_seconds(), time.perf_counter()
        for each in range(50, amount):
            task.apply_async((each,))
        published = time.perf_counter() - started
        mark.apply_async(("end",))
        worker = WorkerProcess(
            "benchmarks.keyed", broker=broker, conf=settings, pool="solo", concurrency=1, loglevel="WARNING"
        )
        with worker, redis.Redis(port=clock.port, socket_timeout=None) as client:
            begin, end = (client.blpop([name], timeout=60) for name in ("begin", "end"))
            cpu = probe.cpu_seconds() - cpu
        if begin is None or end is None:
            raise TimeoutError(f"{kind}: {amount} tasks did not run")
        probe.close()
        app.close()
        pools.reset()
    ran = float(end[1]) - float(begin[1])
    return {"call": (published / (amount - 50) + ran / amount) * 1e6, "cpu": cpu / amount * 1e6}


def _lives(server: RedisServer, amount: int, kind: str) -> dict[str, float]:
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
        probe = ServerProbe(server.port)
        cpu, started = probe.cpu_seconds(), time.perf_counter()
        for number in range(51, 51 + amount):
            live(number)
        taken, cpu = time.perf_counter() - started, probe.cpu_seconds() - cpu
        probe.close()
    return {"call": taken / amount * 1e6, "cpu": cpu / amount * 1e6}
