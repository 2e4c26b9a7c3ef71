"""The allocation of 60,000 partitions: balance, movement and computing time; rebalances through ZooKeeper."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, closing
from functools import partial

from benchmarks.measure import Report, Series, benchmark, interleave
from celery_dq.allocation.assignment import Assignment, RunningWorker, Unit, pack, partitions_of, place
from celery_dq.allocation.nodes import PublishedAssignment, Registration
from celery_dq.allocation.rebalancer import allocator
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.znodes import AllocationNodes
from celery_dq.zookeeper.session import Session

PARTITIONS = 60_000
#: Queues and partitions of each: one queue, EMQ's shape of 20 groups to a topic, queues of one partition.
SHAPES = {"1 x 60,000": (1, PARTITIONS), "3,000 x 20": (3_000, 20), "60,000 x 1": (PARTITIONS, 1)}
WORKERS = (2, 5, 10, 20, 50, 100, 200)
#: Workers that leave, one at a time, for the mean movement.
DEPARTURES = 5


@benchmark(
    "queues x partitions | workers | largest/mean | smallest/mean | join | leave | by modulo | compute ms"
    " | list kB",
    f"""
    join, leave: partitions that move, as a multiple of those that must move
    leave: mean and worst of {DEPARTURES} departures, each from the full number of workers
    by modulo: the same for a join where partition i belongs to worker i modulo n
    list: compressed bytes of one worker's list in ZooKeeper
    """,
)
def allocation(report: Report, quick: bool) -> None:
    """Compute assignments of 60,000 partitions, before and after a worker has joined or left."""
    for shape, (queues, each) in SHAPES.items():
        units = partitions_of({f"queue-{number}": each for number in range(queues)})
        for count in (2, 20, 200) if quick else WORKERS:
            found = _measure(units, count)
            report.row(shape, count, *found.values())
            report.data[f"{shape}, {count} workers"] = {name: str(value) for name, value in found.items()}


def _measure(units: list[Unit], count: int) -> dict[str, object]:
    workers = [f"celery@host-{number}" for number in range(count)]
    times, placed = [], {}
    for _ in range(3):
        started = time.perf_counter()
        placed = place(units, workers)
        times.append((time.perf_counter() - started) * 1000)
    now, mean = Assignment(placed), len(units) / count
    lists = now.lists()
    loads = {worker: sum(map(len, served.values())) for worker, served in lists.items()}
    joined = Assignment(place(units, [*workers, "celery@new"]))
    gets = sum(worker == "celery@new" for worker in joined.servers.values())
    leaves = []
    for gone in workers[: DEPARTURES if count > 2 else 0]:
        left = Assignment(place(units, [worker for worker in workers if worker != gone]))
        leaves.append(now.moved(left) / loads[gone])
    modulo = sum(number % count != number % (count + 1) for number in range(len(units)))
    return {
        "largest": round(max(loads.values()) / mean, 4),
        "smallest": round(min(loads.values()) / mean, 3),
        "join": round(now.moved(joined) / gets, 3),
        "leave": f"{sum(leaves) / len(leaves):.3f} ({max(leaves):.3f})" if leaves else "-",
        "modulo": f"{modulo / (len(units) / (count + 1)):.3g}",
        "compute": Series(times),
        "list": f"{max(len(pack(served)) for served in lists.values()) / 1000:.3g}",
    }


@benchmark(
    "workers | flip after ms | written kB | nodes",
    f"""
    {PARTITIONS:,} partitions of 3,000 queues; one node of a running worker is deleted
    flip after: until another client has read the next generation; a session adds its timeout
    """,
)
def rebalancing(report: Report, quick: bool) -> None:
    """Measure the time from the end of a member to the flip of the generation, on a real ZooKeeper."""
    with ZooKeeperServer() as server:
        contenders = ("5", "20") if quick else ("5", "20", "50", "200")
        rounds = 1 if quick else 3
        found = interleave(contenders, rounds, partial(_rebalance, server.hosts), 600)
    report.compare(found, "5", "flip | bytes | nodes")


def _rebalance(hosts: str, count: str) -> dict[str, float]:
    hosts = f"{hosts}/r-{count}-{time.time_ns()}"
    nodes = AllocationNodes("online")
    queues = {f"queue-{number}": PARTITIONS // 3_000 for number in range(3_000)}
    with ExitStack() as stack:
        session = stack.enter_context(closing(Session(hosts)))
        # One session holds all nodes: a further thread per worker would be measured, too.
        members = [Registration(session, nodes, f"celery@host-{number}") for number in range(int(count))]
        for number, member in enumerate(members):
            member.write(RunningWorker(f"celery@host-{number}", queues))
        runner = allocator(stack.enter_context(closing(Session(hosts))), "online", "allocator", 0.0)
        stack.callback(runner.close)
        runner.open()
        published, flipped = PublishedAssignment(session, nodes), threading.Event()

        def is_complete() -> bool:
            generation = published.generation()
            return generation is not None and generation.workers == int(count)

        wait_until(is_complete, 120)
        former = published.generation(lambda _event: flipped.set())
        started = time.perf_counter()
        members[0].remove()
        flipped.wait(120)
        took_ms = (time.perf_counter() - started) * 1000
        generation = published.generation()
        assert generation is not None
        assert former is not None
        assert generation.number == former.number + 1
        lists = published.read(generation.number).lists()
        return {
            "flip": took_ms,
            "bytes": sum(len(pack(served)) for served in lists.values()) / 1000,
            "nodes": float(len(lists)),
        }
