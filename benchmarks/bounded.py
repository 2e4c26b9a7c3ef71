"""The bound of a tenant's backlog under many producers: whether it holds, and the price of a push."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import redis
from kombu import Consumer, Message, Queue

from benchmarks.measure import Report, benchmark, interleave
from benchmarks.postbox import connect
from benchmarks.workers import app_of, settings
from celery_dq import QueueFull
from celery_dq.keys import PartitionKeys
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.brokers import DQ

QUEUE, TENANT = "bounded", "t"
PRODUCERS, BOUND = 8, 1_000
#: Messages per second that the consumer takes: fewer than the producers push, so that the backlog is full.
TAKEN_PER_S = 1_500
#: Case -> the tenant that has a quota, and the quota.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a weight": (TENANT, {"weight": 2}),
    "max_waiting 1,000": (TENANT, {"weight": 2, "max_waiting": BOUND}),
    "never full": (TENANT, {"weight": 2, "max_waiting": 1_000_000_000}),
    "another tenant's weight": ("other", {"weight": 2}),
    "another tenant's bound": ("other", {"weight": 2, "max_waiting": BOUND}),
}
#: Reads the backlog of a tenant at one moment.
_BACKLOG = "return redis.call('ZCARD', KEYS[1]) + redis.call('HEXISTS', KEYS[2], ARGV[1])"


@benchmark(
    "quota | pushes/s | vs without a bound | refused | most above | samples | not accounted for",
    """
    {pushes:,} calls of one tenant by {producers} processes, with refuse
    a consumer takes {taken:,} messages/s; all other parts of the quotas are equal
    most above: the longest backlog beyond the bound, of all samples; one script reads it, all the time
    not accounted for: calls that are neither accepted nor refused, and accepted ones that were not delivered
    never full: a bound of a billion; another tenant's: that of the queue's only quota, of another tenant
    """,
)
def bounded(report: Report, quick: bool) -> None:
    """Measure pushes to a tenant with a bound, beside one without."""
    pushes = 8_000 if quick else 100_000
    report.fill_in(pushes=pushes, producers=PRODUCERS, taken=TAKEN_PER_S)
    found = interleave([*CASES], 1 if quick else 3, partial(_round, pushes), 500)
    quantities = "pushes_s | vs pushes_s | refused | above | samples | lost"
    for base in ("a weight", "another tenant's weight"):
        own = base.startswith("another")
        cases = {name: row for name, row in found.items() if name.startswith("another") == own}
        report.compare(cases, base, quantities)


def _round(pushes: int, case: str) -> dict[str, float]:
    tenant, quota = CASES[case]
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer())
        conf = settings(DQ.url(server.port), task_default_queue=QUEUE)
        app = stack.enter_context(app_of("dq", conf))
        client = stack.enter_context(redis.Redis(port=server.port, socket_timeout=None))
        app.tasks["noop"].apply_async(tenant="first")
        app.dq.quotas.set(QUEUE, tenant, **quota)
        # They begin as forks, before this process has threads.
        fork = multiprocessing.get_context("fork")
        go, reports = fork.Event(), fork.Queue()
        for _ in range(PRODUCERS):
            fork.Process(target=_produce, args=(app, pushes // PRODUCERS, go, reports), daemon=True).start()
        for _ in range(PRODUCERS):
            reports.get(timeout=60)
        backlogs = stack.enter_context(_sampled(server.port))
        taken = stack.enter_context(_consuming(server.port))
        go.set()
        accepted, refused, began, ended = zip(
            *(reports.get(timeout=500) for _ in range(PRODUCERS)), strict=True
        )
        taken["per_s"] = 0  # as fast as it can
        keys = PartitionKeys("online", QUEUE)
        wait_until(lambda: not client.hlen(keys.messages), 300)
        limit = quota.get("max_waiting", sys.maxsize) if tenant == TENANT else sys.maxsize
        return {
            "pushes_s": pushes / (max(ended) - min(began)),
            "refused": sum(refused),
            "above": max(0, max(backlogs) - limit),
            "samples": len(backlogs),
            "lost": abs(pushes - sum(accepted + refused)) + abs(sum(accepted) + 1 - taken["count"]),
        }


@contextmanager
def _sampled(port: int) -> Iterator[list[int]]:
    """Read the backlog all the time; yield the list of its lengths."""
    keys, found, over = PartitionKeys("online", QUEUE), [0], threading.Event()

    def sample() -> None:
        with redis.Redis(port=port, socket_timeout=None) as client:
            read = client.register_script(_BACKLOG)
            while not over.is_set():
                found.append(int(read([keys.tenant(TENANT), keys.single], [TENANT])))

    with _beside(sample, over):
        yield found


@contextmanager
def _consuming(port: int) -> Iterator[dict[str, int]]:
    """Take messages at a rate; yield the rate, 0 for no limit, and how many were taken."""
    taken, over = {"per_s": TAKEN_PER_S, "count": 0}, threading.Event()

    def consume() -> None:
        due = time.monotonic()

        def take(message: Message) -> None:
            nonlocal due
            taken["count"] += 1
            message.ack()
            if taken["per_s"]:
                due = max(due + 1 / taken["per_s"], time.monotonic() - 0.01)
                time.sleep(max(0.0, due - time.monotonic()))

        with connect("dq", port) as connection, _consumer(connection, take):
            while not over.is_set():
                with suppress(TimeoutError):
                    connection.drain_events(timeout=0.05)

    with _beside(consume, over):
        yield taken


@contextmanager
def _beside(run: Callable[[], None], over: threading.Event) -> Iterator[None]:
    """Run a function in a thread, which `over` ends with the block."""
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _consumer(connection: Any, take: Any) -> Any:
    return Consumer(connection, [Queue(QUEUE)], on_message=take, prefetch_count=100, accept=["json"])


def _produce(app: Any, count: int, go: Any, reports: Any) -> None:
    """Push messages when the event is set, and report what became of them."""
    noop, accepted = app.tasks["noop"], 0
    for number in range(3):
        noop.apply_async((number,), queue="warm")
    reports.put("ready")
    go.wait()
    began = time.monotonic()
    for number in range(count):
        try:
            noop.apply_async((number,), tenant=TENANT)
            accepted += 1
        except QueueFull:  # noqa: PERF203 - it is counted
            continue
    reports.put((accepted, count - accepted, began, time.monotonic()))
