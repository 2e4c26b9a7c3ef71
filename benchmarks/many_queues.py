"""One worker on many queues: throughput, idle cost, heartbeat and start-up by the number of queues."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import psutil
import redis

from benchmarks.measure import Report, Series, ServerProbe, chosen, dump, interleave, ratio
from benchmarks.postbox import batch_of
from benchmarks.shop import DEFAULTS, NAME, add_tasks
from celery_dq.keys import PartitionKeys
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.consuming.consumer_threads import ConsumerThreads
from celery_dq.transport.redis.in_flight.consumer_identity import ConsumerIdentity
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.partition_map import PartitionMap
from celery_dq.transport.redis.store.queue import Queue
from tests.brokers import ACTIVE, BROKERS
from tests.workers import WorkerProcess, make_app

QUEUES, QUICK_QUEUES = (1, 100, 1_000, 3_000), (1, 100)
#: Seconds of idleness that are measured.
IDLE_S, QUICK_IDLE_S = 10.0, 2.0
#: Most queues that the stock transport is measured with.
STOCK_QUEUES = 1_000
#: Seconds after which no further round begins, and the most rounds.
BUDGET_S, ROUNDS = 360.0, 5
#: Seconds after which a run counts by the messages that it has done until then.
LIMIT_S = 20.0


def many_queues(quick: bool, only: str = "") -> Report:
    """Measure one worker on many queues: messages/s, idle cost, a round of the heartbeat, start-up."""
    amount, idle_s = (1_000, QUICK_IDLE_S) if quick else (12_000, IDLE_S)
    report = Report("many_queues")
    report.header = ["queues", "broker", "spread/s", "vs 1 queue", "in one/s", "vs stock", "cmds/msg"]
    report.header += ["idle CPU %", "idle cmds/s", "idle redis CPU %", "redis MB", "worker MB"]
    report.header += ["heartbeat ms", "start s"]
    report.notes.append("threads pool with 2 slots, Celery's default prefetch multiplier, no events")
    report.notes.append(
        f"spread: a backlog of {amount:,} no-op tasks, the same number in each queue; in one: all of them in "
        "one queue"
    )
    report.notes.append("published before the worker starts; rate and commands count from the first task on")
    report.notes.append("one queue is measured in each round; vs 1 queue compares the runs of one round")
    report.notes.append(f"the stock transport is measured with {STOCK_QUEUES:,} queues at most")
    report.notes.append(
        "cmds: commands that Redis has executed, those inside scripts and of heartbeats included"
    )
    report.notes.append("heartbeat: one round over all leases; start: from the process to worker_ready")
    runs = contenders(QUICK_QUEUES if quick else QUEUES, only)
    found = interleave(
        list(runs), 1 if quick else ROUNDS, lambda run: _round(*runs[run], amount, idle_s), BUDGET_S
    )
    for run, (queues, name) in runs.items():
        row = found[run]
        versus_one = ratio(row["spread"], found[f"1 queues, {name}"]["spread"])
        versus = ratio(row["one"], found.get(f"{queues} queues, stock", {}).get("one", Series()))
        keys = ("commands", "idle_cpu", "idle_commands", "idle_redis", "idle_mb", "worker_mb")
        rest = [*(row[key] for key in keys), row.get("heartbeat", "-"), row["start"]]
        report.row(queues, name, row["spread"], versus_one, row["one"], versus, *rest)
        report.data.setdefault(f"{queues} queues", {}).update(dump({name: row}))
    return report


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
    spread = run_backlog(broker, names, amount, lambda number: {"queue": names[number % queues]}, idle_s)
    one = run_backlog(broker, names, amount, lambda _: {"queue": names[0]})
    found = {**spread, "spread": spread["rate"], "one": one["rate"]}
    if BROKERS[broker].has_leases:
        found["heartbeat"] = heartbeat_ms([PartitionKeys("online", name) for name in names])
    return found


def run_backlog(
    broker: str,
    names: list[str],
    amount: int,
    options: Callable[[int], dict[str, Any]],
    idle_s: float = 0.0,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, float]:
    """Run a backlog by one worker; return its start, its rate, its commands per message and its idle cost.

    Args:
        broker: The broker.
        names: The queues of the worker.
        amount: Number of messages.
        options: Returns the options of ``apply_async`` for each message.
        idle_s: Seconds of idleness to measure.
        settings: Further settings of the app.
    """
    with RedisServer() as server, RedisServer() as clock:
        conf: dict[str, Any] = {
            **DEFAULTS,
            "broker_url": BROKERS[broker].url(server.port),
            "clock_port": clock.port,
            "counted": amount,
            **settings,
        }
        app = add_tasks(make_app(NAME, BROKERS[broker], conf), clock.port)
        counted = app.tasks["counted"]
        with app.producer_pool.acquire(block=True) as producer, batch_of(producer):
            for number in range(amount):
                counted.apply_async(producer=producer, **options(number))
        worker = WorkerProcess(
            "benchmarks.shop",
            broker=BROKERS[broker],
            conf=conf,
            pool="threads",
            queues=names,
            loglevel="WARNING",
        )
        probe = _Commands(server.port)
        with redis.Redis(port=clock.port, socket_timeout=None) as client:
            started = time.monotonic()
            worker.start()
            try:
                worker.wait_ready(180.0)
                start_s = time.monotonic() - started
                begin: Any = client.blpop(["begin"], timeout=60)
                before = probe.commands()
                client.blpop(["end"], timeout=LIMIT_S)
                spent, done = probe.commands() - before, client.get("done")
                if begin is None or done is None:
                    raise TimeoutError("the worker ran no task")
                count, at = map(float, done.split())
                figures = {
                    "start": start_s,
                    "rate": count / (at - float(begin[1])),
                    "commands": spent / count,
                }
                if idle_s:
                    figures.update(_idle(worker, probe, idle_s))
            except BaseException:
                print(worker.log[-4000:])
                raise
            finally:
                worker.discard()
                probe.close()
        app.close()
    return figures


def _idle(worker: WorkerProcess, probe: _Commands, seconds: float) -> dict[str, float]:
    """CPU of the worker and commands of Redis while nothing happens."""
    process = psutil.Process(worker.pid)
    time.sleep(2.0)  # the last acks and the first waits
    commands, cpu, started = probe.commands(), sum(process.cpu_times()[:2]), time.monotonic()
    redis_s = probe.cpu_seconds()
    time.sleep(seconds)  # the period that is measured
    took_s = time.monotonic() - started
    return {
        "idle_cpu": (sum(process.cpu_times()[:2]) - cpu) / took_s * 100,
        "idle_commands": (probe.commands() - commands) / took_s,
        "idle_redis": (probe.cpu_seconds() - redis_s) / took_s * 100,
        "idle_mb": probe.bytes_used() / 1e6,
        "worker_mb": process.memory_info().rss / 1e6,
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


class _Commands(ServerProbe):
    """The number of commands that the server has executed, those inside scripts included."""

    def commands(self) -> float:
        return float(self._client.info("stats")["total_commands_processed"])
