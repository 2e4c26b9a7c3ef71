"""A model of a large installation: servers, workers, connections, heartbeats, memory and ZooKeeper traffic.

``python -m benchmarks fleet`` prints its table without measuring anything. The constants are figures that
other benchmarks have measured on a machine with two cores; each names its command. ``fleet_check`` compares
the model with measurements on this machine. The guide *A million messages a second* explains the formulas.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

from benchmarks.cluster import servers
from benchmarks.measure import Report, benchmark, dump, interleave, short, spending, steadily
from benchmarks.workers import app_of, await_end, settings, worker_of
from celery_dq.transport.redis.store.home import home_of


class Constant(NamedTuple):
    """A measured figure."""

    value: float
    meaning: str
    #: The benchmark that measures it.
    command: str


MESSAGE_US = Constant(200, "µs of Redis for a message that comes alone, publish to ack", "fleet_check")
QUOTA_US = Constant(80, "µs of Redis more, if the message has waited for its queue's rate", "many_quotas")
WORKER_US = Constant(690, "µs of a worker's main process for a message that comes alone", "fleet_check")
CLUSTER = Constant(1.4, "CPU of a message on a cluster, beside one server", "cluster")
HEARTBEAT_US = Constant(25, "µs of Redis for a heartbeat of an idle partition", "many_queues")
PARTITION_BYTES = Constant(1_100, "bytes of an idle partition", "many_queues")
WORKER_MB = Constant(73, "MB of a worker's main process, threads pool", "many_queues")
WORKER_PARTITION_KB = Constant(12.5, "kB more for each partition", "many_queues")
MESSAGE_BYTES = Constant(490, "bytes of a waiting message, beside its arguments", "memory")
PUBLISHER = Constant(42_000, "calls/s of a process with the buffer", "buffering")
LIST_BYTES = Constant(3.3, "bytes of a partition in the list of its worker", "allocation")

#: Share of a core that servers and workers use, so that a lost one can be borne.
UTILISATION = 0.6
#: Bytes of the arguments of a message, and seconds of the backlog to survive.
ARGUMENT_BYTES, BACKLOG_S = 200, 60
#: Defaults of ``dq_lease`` and ``dq_election_session``, and of the renewals and pings in each of them.
LEASE_S, RENEWALS, SESSION_S, PINGS = 15.0, 4, 10.0, 3
#: Connections of a worker to each master that serves its partitions: scripts, wake-ups, heartbeat. On one
#: server, the wake-ups of each 100 queues come on one connection, and of all on 25 at most.
CONNECTIONS, GROUP_SIZE, MAX_GROUPS = 3, 100, 25
#: Connections of a worker for broadcasts and publishing.
OTHERS = 2


class Plan(NamedTuple):
    """An installation to be sized."""

    name: str
    messages_per_s: float
    #: Logical queues: tenants, or queues of their own where each has a partition.
    queues: int
    partitions: int
    #: Whether each message waits for a rate; else none does.
    waits_for_rate: bool = False
    on_cluster: bool = True


PLANS = (
    Plan("EMQ's machine", 1_000, 3_000, 3_000, waits_for_rate=True, on_cluster=False),
    Plan("60,000 queues, throttled", 1_000_000, 60_000, 60_000, waits_for_rate=True),
    Plan("60,000 queues", 1_000_000, 60_000, 60_000),
    Plan("60,000 tenants", 1_000_000, 60_000, 12_000),
)


def distinct(choices: float, boxes: int) -> float:
    """Return how many of `boxes` equal boxes are expected to be chosen at least once by that many choices."""
    return boxes * (1 - math.pow(1 - 1 / boxes, choices))


def skew(plan: Plan) -> float:
    """Return the most tenants of a partition beside the mean; 1 where each queue has its own partition."""
    if plan.queues == plan.partitions:
        return 1.0
    homes = Counter(home_of(f"tenant-{number}", plan.partitions) for number in range(plan.queues))
    return max(homes.values()) * plan.partitions / plan.queues


def size_of(plan: Plan) -> dict[str, float]:
    """Return the size of an installation in which each partition is allocated to one worker.

    Raises:
        ValueError: The plan has fewer partitions than it needs masters or workers.
    """
    redis_us = MESSAGE_US.value + (QUOTA_US.value if plan.waits_for_rate else 0)
    redis_us *= CLUSTER.value if plan.on_cluster else 1
    redis_cores = plan.messages_per_s * redis_us / 1e6
    heartbeats = plan.partitions * RENEWALS / LEASE_S
    heartbeat_cores = heartbeats * HEARTBEAT_US.value / 1e6
    masters = math.ceil((redis_cores + heartbeat_cores) / UTILISATION)
    workers = math.ceil(plan.messages_per_s * WORKER_US.value / 1e6 / UTILISATION)
    if plan.partitions < max(masters, workers):
        raise ValueError(
            f"{plan.partitions} partitions cannot keep {masters} masters, {workers} workers busy"
        )
    each = plan.partitions / workers
    connections = OTHERS + CONNECTIONS * distinct(each, masters)
    if not plan.on_cluster:
        connections += min(math.ceil(each / GROUP_SIZE), MAX_GROUPS) - 1
    publishers = math.ceil(plan.messages_per_s / PUBLISHER.value)
    return {
        "messages/s of a partition": plan.messages_per_s / plan.partitions,
        # The load of the busiest one, with equal tenants.
        "busiest partition / mean": skew(plan),
        "Redis, µs of CPU for a message": redis_us,
        "Redis, cores busy with messages": redis_cores,
        "heartbeats/s": heartbeats,
        "Redis, cores busy with heartbeats": heartbeat_cores,
        "masters": masters,
        # Each message that comes alone causes one.
        "wake-ups/s of a master, at most": plan.messages_per_s / masters,
        "worker main processes": workers,
        "partitions of a worker": each,
        "connections of a worker": connections,
        "connections of a master": workers * connections / masters + publishers,
        "publishing processes": publishers,
        "workers, GB": (workers * WORKER_MB.value + plan.partitions * WORKER_PARTITION_KB.value / 1e3) / 1e3,
        "backlog of a minute, GB": (
            plan.messages_per_s * BACKLOG_S * (MESSAGE_BYTES.value + ARGUMENT_BYTES) / 1e9
        ),
        "idle partitions, GB": plan.partitions * PARTITION_BYTES.value / 1e9,
        "ZooKeeper, pings/s": workers * PINGS / SESSION_S,
        # Written and read after a worker has come or gone.
        "ZooKeeper, kB written for a change": plan.partitions * LIST_BYTES.value / 1e3,
        "ZooKeeper, reads for a change": 2 * workers,
    }


@benchmark(
    " | ".join(["quantity", *(plan.name for plan in PLANS)]),
    "computed from figures of other benchmarks; nothing is measured here",
)
def fleet(report: Report, quick: bool) -> None:
    """Compute the sizes of EMQ's machine, and of a million messages/s of 60,000 queues in three layouts."""
    sizes = [size_of(plan) for plan in PLANS]
    report.row("messages/s", *(f"{plan.messages_per_s:,.0f}" for plan in PLANS))
    report.row("partitions", *(f"{plan.partitions:,}" for plan in PLANS))
    for title in sizes[0]:
        report.row(title, *(short(size[title]) for size in sizes))
    report.data = {plan.name: size for plan, size in zip(PLANS, sizes, strict=True)}


#: Messages/s in all, broker and partitions of each case.
CASES = {
    "1 server, 1 partition, 100/s": (100.0, "dq", 1),
    "1 server, 1 partition, 500/s": (500.0, "dq", 1),
    "1 server, 2 partitions, 500/s": (500.0, "dq", 2),
    "1 server, 3 partitions, 500/s": (500.0, "dq", 3),
    "3 masters, 3 partitions, 500/s": (500.0, "cluster", 3),
}
TENANTS = 300
QUEUE = "push"


@benchmark(
    "case | run/s | redis µs | model | error % | worker µs | model | error %",
    f"""
    one worker, threads pool with 2 slots; one apply_async at a time; idle CPU included
    no-op tasks of {TENANTS} tenants; µs of CPU: of all masters, of the worker
    error: of the model, beside the measured figure
    """,
)
def fleet_check(report: Report, quick: bool) -> None:
    """Compare the CPU time of a message with that of the model."""
    found = interleave(list(CASES), 1 if quick else 3, partial(_round, 4.0 if quick else 15.0), 600)
    for name, row in found.items():
        rate, broker, partitions = CASES[name]
        size = size_of(Plan(name, rate, TENANTS, partitions, on_cluster=broker == "cluster"))
        cells: list[object] = []
        for quantity, model in (("cpu", size["Redis, µs of CPU for a message"]), ("others", WORKER_US.value)):
            cells += [row[quantity], short(model), f"{100 * (model / row[quantity].median - 1):+.0f}"]
        report.row(name, row["rate"], *cells)
    report.data = dump(found)


def _round(seconds: float, case: str) -> dict[str, float]:
    rate, broker, partitions = CASES[case]
    with servers(broker) as (url, ports):
        conf = settings(url, dq_queues={QUEUE: {"partitions": partitions}})
        with (
            app_of(broker, conf) as app,
            worker_of(broker, conf, pool="threads", queues=[QUEUE]) as worker,
        ):
            _publish(app, rate, 1.0)  # loads the scripts, and makes the connections
            with spending(*ports, pids=[worker.pid]) as spent:
                amount = _publish(app, rate, seconds)
    return spent.per(amount)


def _publish(app: Any, rate: float, seconds: float) -> int:
    """Publish at a steady rate; wait until the messages have run, and return their number."""
    amount = 0
    with app.producer_pool.acquire(block=True) as producer:
        for amount in steadily(rate, seconds):
            app.tasks["noop"].apply_async(queue=QUEUE, tenant=f"t{amount % TENANTS}", producer=producer)
    await_end(app, QUEUE)
    return amount + 1
