"""A model of a large installation: servers, workers, connections, heartbeats, memory and ZooKeeper traffic.

``python -m benchmarks fleet`` prints its table without measuring anything. The constants are figures that
other benchmarks have measured on a machine with two cores; each names its command. ``fleet_check`` compares
the model with measurements on this machine. The guide *A million messages a second* explains the formulas.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from benchmarks.measure import Report, benchmark, short
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


class Fleet(NamedTuple):
    """The size of an installation."""

    partition_rate: float
    #: Load of the busiest partition beside the mean, with equal tenants.
    skew: float
    redis_us: float
    redis_cores: float
    heartbeats_per_s: float
    heartbeat_cores: float
    masters: int
    #: Of one master, at most: each message that comes alone causes one.
    wakeups_per_s: float
    workers: int
    partitions_per_worker: float
    #: Of one worker, and of one master.
    worker_connections: float
    master_connections: float
    publishers: int
    workers_gb: float
    backlog_gb: float
    idle_gb: float
    pings_per_s: float
    #: Written and read in ZooKeeper after a worker has come or gone.
    list_kb: float
    reads: int


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


def size_of(plan: Plan) -> Fleet:
    """Return the size of an installation in which each partition is allocated to one worker.

    Raises:
        ValueError: The plan has fewer partitions than it needs masters or workers.
    """
    rate = plan.messages_per_s / plan.partitions
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
    return Fleet(
        partition_rate=rate,
        skew=skew(plan),
        redis_us=redis_us,
        redis_cores=redis_cores,
        heartbeats_per_s=heartbeats,
        heartbeat_cores=heartbeat_cores,
        masters=masters,
        wakeups_per_s=plan.messages_per_s / masters,
        workers=workers,
        partitions_per_worker=each,
        worker_connections=connections,
        master_connections=workers * connections / masters + publishers,
        publishers=publishers,
        workers_gb=(workers * WORKER_MB.value + plan.partitions * WORKER_PARTITION_KB.value / 1e3) / 1e3,
        backlog_gb=plan.messages_per_s * BACKLOG_S * (MESSAGE_BYTES.value + ARGUMENT_BYTES) / 1e9,
        idle_gb=plan.partitions * PARTITION_BYTES.value / 1e9,
        pings_per_s=workers * PINGS / SESSION_S,
        list_kb=plan.partitions * LIST_BYTES.value / 1e3,
        reads=2 * workers,
    )


@benchmark(
    " | ".join(["quantity", *(plan.name for plan in PLANS)]),
    "computed from figures of other benchmarks; nothing is measured here",
)
def fleet(report: Report, quick: bool) -> None:
    """Compute the sizes of EMQ's machine, and of a million messages/s of 60,000 queues in three layouts."""
    sizes = [size_of(plan) for plan in PLANS]
    report.row("messages/s", *(f"{plan.messages_per_s:,.0f}" for plan in PLANS))
    report.row("partitions", *(f"{plan.partitions:,}" for plan in PLANS))
    rows = {
        "messages/s of a partition": "partition_rate",
        "busiest partition / mean": "skew",
        "Redis, µs of CPU for a message": "redis_us",
        "Redis, cores busy with messages": "redis_cores",
        "heartbeats/s": "heartbeats_per_s",
        "Redis, cores busy with heartbeats": "heartbeat_cores",
        "masters": "masters",
        "wake-ups/s of a master, at most": "wakeups_per_s",
        "worker main processes": "workers",
        "partitions of a worker": "partitions_per_worker",
        "connections of a worker": "worker_connections",
        "connections of a master": "master_connections",
        "publishing processes": "publishers",
        "workers, GB": "workers_gb",
        "backlog of a minute, GB": "backlog_gb",
        "idle partitions, GB": "idle_gb",
        "ZooKeeper, pings/s": "pings_per_s",
        "ZooKeeper, kB written for a change": "list_kb",
        "ZooKeeper, reads for a change": "reads",
    }
    for title, field in rows.items():
        report.row(title, *(short(getattr(size, field)) for size in sizes))
    report.data = {plan.name: size._asdict() for plan, size in zip(PLANS, sizes, strict=True)}
