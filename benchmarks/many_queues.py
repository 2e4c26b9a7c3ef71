"""One worker on many queues, or on many partitions: throughput, idle cost, heartbeat and start-up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import psutil
import redis

from benchmarks.measure import (
    Report,
    Series,
    ServerProbe,
    benchmark,
    chosen,
    dump,
    interleave,
    ratio,
    spending,
)
from benchmarks.postbox import batch_of
from benchmarks.workers import app_of, settings, worker_of
from celery_dq.keys import PartitionKeys
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.consuming.consumer_threads import ConsumerThreads
from celery_dq.transport.redis.store.partition import Partition, Queue
from celery_dq.transport.redis.store.partition_map import PartitionMap
from tests.brokers import ACTIVE, BROKERS

QUEUES, QUICK_QUEUES = (1, 100, 1_000, 3_000), (1, 100)
#: The quantities of the other columns.
OTHERS = ("commands", "idle_cpu", "idle_commands", "idle_redis", "idle_mb", "worker_mb", "heartbeat", "start")
#: Seconds of idleness that are measured.
IDLE_S, QUICK_IDLE_S = 10.0, 2.0
#: Most queues that the stock transport is measured with.
STOCK_QUEUES = 1_000
#: Seconds after which no further round begins, and the most rounds.
BUDGET_S, ROUNDS = 360.0, 5
#: Seconds after which a run counts by the messages that it has done until then.
LIMIT_S = 20.0


@benchmark(
    "queues | broker | spread/s | vs 1 queue | in one/s | vs stock | cmds/msg | idle CPU % | idle cmds/s"
    " | idle redis CPU % | redis MB | worker MB | heartbeat ms | start s",
    f"""
    threads pool with 2 slots, Celery's default prefetch multiplier, no events
    spread: a backlog of {{amount:,}} no-op tasks, the same number in each queue; in one: all in one queue
    published before the worker starts; rate and commands count from the first task on
    one queue is measured in each round; vs 1 queue compares the runs of one round
    the stock transport is measured with {STOCK_QUEUES:,} queues at most
    cmds: commands that Redis has executed, those inside scripts and of heartbeats included
    heartbeat: one round over all leases; start: from the process to worker_ready
    """,
)
def many_queues(report: Report, quick: bool, only: str = "") -> None:
    """Measure one worker on many queues: messages/s, idle cost, a round of the heartbeat, start-up."""
    amount, idle_s = (1_000, QUICK_IDLE_S) if quick else (12_000, IDLE_S)
    report.fill_in(amount=amount)
    runs = contenders(QUICK_QUEUES if quick else QUEUES, only)
    found = interleave(
        list(runs), 1 if quick else ROUNDS, lambda run: _round(*runs[run], amount, idle_s), BUDGET_S
    )
    for run, (queues, name) in runs.items():
        row = found[run]
        versus_one = ratio(row["spread"], found[f"1 queues, {name}"]["spread"])
        versus = ratio(row["one"], found.get(f"{queues} queues, stock", {}).get("one", Series()))
        rest = (row.get(key, Series()) for key in OTHERS)
        report.row(queues, name, row["spread"], versus_one, row["one"], versus, *rest)
    report.data = dump(found)


def contenders(counts: Sequence[int], only: str) -> dict[str, tuple[int, str]]:
    """Return the runs of a round: the chosen numbers of queues, and one queue of the same brokers."""

    def by_row(run: tuple[int, str]) -> tuple[int, int]:
        return run[0], ACTIVE.index(run[1])

    cases = {f"{count} queues": count for count in counts}
    found: list[tuple[int, str]] = []
    for case in chosen(list(cases), only):
        for name in ACTIVE:
            if name != "stock" or cases[case] <= STOCK_QUEUES:
                found += [(1, name), (cases[case], name)]
    return {f"{count} queues, {name}": (count, name) for count, name in sorted(set(found), key=by_row)}


def _round(queues: int, broker: str, amount: int, idle_s: float) -> dict[str, float]:
    names = [f"q{number}" for number in range(queues)]
    spread = run_in_queues(broker, names, amount, lambda number: {"queue": names[number % queues]}, idle_s)
    one = run_in_queues(broker, names, amount, lambda _: {"queue": names[0]})
    found = {**spread, "spread": spread["rate"], "one": one["rate"]}
    if BROKERS[broker].has_leases:
        found["heartbeat"] = heartbeat_ms([PartitionKeys("online", name) for name in names])
    return found


def run_in_queues(
    broker: str,
    names: list[str],
    amount: int,
    options: Callable[[int], dict[str, Any]],
    idle_s: float = 0.0,
    **conf: Any,
) -> dict[str, float]:
    """Run a backlog by one worker; return its start, its rate, its commands per message and its idle cost.

    Args:
        broker: The broker.
        names: The queues of the worker.
        amount: Number of messages.
        options: Returns the options of ``apply_async`` for each message.
        idle_s: Seconds of idleness to measure.
        conf: Further settings of the app.
    """
    with ExitStack() as stack:
        server, clock = stack.enter_context(RedisServer()), stack.enter_context(RedisServer())
        conf = settings(BROKERS[broker].url(server.port), clock.port, counted=amount, **conf)
        app = stack.enter_context(app_of(broker, conf))
        with app.producer_pool.acquire(block=True) as producer, batch_of(producer):
            for number in range(amount):
                app.tasks["counted"].apply_async(producer=producer, **options(number))
        probe = stack.enter_context(closing(ServerProbe(server.port)))
        client = stack.enter_context(redis.Redis(port=clock.port, socket_timeout=None))
        started = time.monotonic()
        worker = worker_of(broker, conf, pool="threads", queues=names)
        stack.callback(worker.discard)
        worker.start().wait_ready(180.0)
        start_s = time.monotonic() - started
        begin: Any = client.blpop(["begin"], timeout=60)
        before = probe.commands()
        client.blpop(["end"], timeout=LIMIT_S)
        spent, done = probe.commands() - before, client.get("done")
        if begin is None or done is None:
            raise TimeoutError(f"the worker ran no task:\n{worker.log[-4000:]}")
        count, at = map(float, done.split())
        figures = {"start": start_s, "rate": count / (at - float(begin[1])), "commands": spent / count}
        return figures | (_idle(worker.pid, server.port, probe, idle_s) if idle_s else {})


def _idle(pid: int, port: int, probe: ServerProbe, seconds: float) -> dict[str, float]:
    """CPU of the worker and commands of Redis while nothing happens."""
    time.sleep(2.0)  # the last acks and the first waits
    commands = probe.commands()
    with spending(port, pids=[pid]) as spent:
        time.sleep(seconds)  # the period that is measured
    return {
        "idle_cpu": spent.others_s / spent.wall_s * 100,
        "idle_commands": (probe.commands() - commands) / spent.wall_s,
        "idle_redis": sum(spent.redis_s) / spent.wall_s * 100,
        "idle_mb": probe.bytes_used() / 1e6,
        "worker_mb": psutil.Process(pid).memory_info().rss / 1e6,
    }


def heartbeat_ms(partitions: Sequence[PartitionKeys]) -> float:
    """The milliseconds of one round of the heartbeat over these partitions."""
    with RedisServer() as server:
        pool = redis.ConnectionPool(port=server.port)
        process = ConsumerIdentity(600.0)  # no round by itself
        threads = process.threads = ConsumerThreads(process)
        for keys in partitions:
            queue = Queue(keys.queue, Partition(keys, process.scripts, PartitionMap(len(partitions))))
            threads.keep_lease(queue, lambda: lambda: redis.Redis(connection_pool=pool))
        rounds: list[float] = []
        threads.add_check(rounds.append)
        took = []
        for number in range(1, 7):
            started = time.monotonic()
            threads.renew_now()
            wait_until(lambda number=number: len(rounds) >= number, interval_s=0.0)  # type: ignore[misc]
            took.append(time.monotonic() - started)
        for queue in list(threads.queues.values()):
            threads.drop_lease(queue)
        wait_until(lambda: not threads.queues)
        pool.disconnect()
    return sorted(took)[len(took) // 2] * 1e3


PARTITIONS = ("1", "4", "64")
TENANTS = 1_000


@benchmark(
    "partitions | messages/s | vs 1 | cmds/msg | idle CPU % | idle cmds/s | heartbeat ms | start s",
    f"""
    threads pool with 2 slots, Celery's default prefetch multiplier, no events
    no-op tasks of {TENANTS:,} tenants, published before the worker starts
    cmds: commands that Redis has executed, those inside scripts included
    heartbeat: one round over all leases; start: from the process to worker_ready
    """,
)
def partitions(report: Report, quick: bool) -> None:
    """Measure one worker on a queue with several partitions, all of them on one Redis."""
    amount, idle_s = (2_000, QUICK_IDLE_S) if quick else (12_000, IDLE_S)
    found = interleave(PARTITIONS, 1 if quick else 3, partial(_run_partitions, amount, idle_s), 300)
    columns = "rate | vs rate | commands | idle_cpu | idle_commands | heartbeat | start"
    report.compare(found, "1", columns)


def _run_partitions(amount: int, idle_s: float, count: str) -> dict[str, float]:
    def options(number: int) -> dict[str, str]:
        return {"queue": "push", "tenant": f"t{number % TENANTS}"}

    keys = [PartitionKeys("online", "push", number) for number in range(int(count))]
    conf = {"dq_queues": {"push": {"partitions": int(count)}}}
    return {
        **run_in_queues("dq", ["push"], amount, options, idle_s, **conf),
        "heartbeat": heartbeat_ms(keys),
    }
