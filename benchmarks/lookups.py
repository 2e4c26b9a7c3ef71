"""A task that is looked for and revoked by its id, by the number of partitions of its queue."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import redis

from benchmarks.measure import Report, benchmark, interleave, spending
from celery_dq.testing.servers import RedisServer
from tests.brokers import DQ
from tests.workers import make_app

PARTITIONS = ("1", "16", "64", "256")
TENANTS, MESSAGES = 500, 2_000


@benchmark(
    "partitions | find ms | vs 1 | in Redis ms | revoke waiting ms | vs 1 | in Redis ms | revoke unknown ms"
    " | vs 1 | in Redis ms",
    f"""
    one task id a call, among {MESSAGES:,} waiting messages of {TENANTS} tenants
    in Redis: INFO commandstats of all commands of the call
    """,
)
def lookups(report: Report, quick: bool) -> None:
    """Measure find and revoke on a queue with several partitions, all of them on one Redis."""
    with RedisServer() as server:
        found = interleave(
            PARTITIONS, 1 if quick else 5, partial(_round, server.port, 10 if quick else 40), 300
        )
    calls = ("find", "waiting", "unknown")
    report.compare(found, "1", " | ".join(f"{call} | vs {call} | {call} in Redis" for call in calls))


def _round(port: int, calls: int, count: str) -> dict[str, float]:
    with redis.Redis(port=port) as client:
        client.flushall()
        conf = {"broker_url": DQ.url(port), "dq_queues": {"push": {"partitions": int(count)}}}
        app: Any = make_app("push", DQ, conf)
        with app.producer_pool.acquire(block=True) as producer:
            ids = [
                app.send_task("shop.notify", tenant=f"t{number % TENANTS}", producer=producer).id
                for number in range(MESSAGES)
            ]
        dq = app.dq
        waiting, unknown = ids[:: MESSAGES // calls], [str(uuid.uuid4()) for _ in range(calls)]
        dq.find(ids[0])
        measured = {
            "find": _each(client, dq.find, waiting),
            "waiting": _each(client, lambda each: dq.revoke([each]), waiting),
            "unknown": _each(client, lambda each: dq.revoke([each]), unknown),
        }
        app.close()
    times = {call: whole for call, (whole, _) in measured.items()}
    return {**times, **{f"{call} in Redis": inside for call, (_, inside) in measured.items()}}


def _each(client: redis.Redis, call: Callable[[str], Any], ids: list[str]) -> tuple[float, float]:
    """Return the milliseconds of a call, and those that Redis was busy with it."""
    client.config_resetstat()
    with spending() as spent:
        for each in ids:
            call(each)
    stats: dict[str, Any] = client.info("commandstats")
    busy = sum(each["usec"] for name, each in stats.items() if name in _TOP)
    return spent.wall_s * 1e3 / len(ids), busy / 1e3 / len(ids)


#: Commands of a call; those inside a script are in its time.
_TOP = {f"cmdstat_{name}" for name in ("evalsha", "eval", "smembers", "multi", "exec")}
