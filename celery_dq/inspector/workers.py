"""Snapshots of the workers that share partitions, read from ZooKeeper. No worker is asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from celery_dq.znodes import AllocationNodes

if TYPE_CHECKING:
    from celery_dq.zookeeper.session import Session

__all__ = ["WorkerSnapshot", "worker_of", "worker_snapshots"]


@dataclass(frozen=True)
class WorkerSnapshot:
    """A worker that shares the partitions of its queues with other workers.

    Attributes:
        name: Name of the worker.
        state: ``serves``; ``waits`` for its first partitions; ``draining``; or ``gone``: its partitions are
            about to get another worker.
        partitions: The partitions that it serves, such as ``push/3``.
        queues: The queues that it consumes and that are allocated.
    """

    name: str
    state: Literal["serves", "waits", "draining", "gone"]
    partitions: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()


def worker_snapshots(session: Session, environment: str) -> list[WorkerSnapshot]:
    """Read the running workers, and the assignment in force.

    Raises:
        ZooKeeperUnreachable: ZooKeeper does not answer.
    """
    # kazoo is imported only if workers share partitions.
    from celery_dq.allocation.members import Members
    from celery_dq.allocation.published import PublishedAssignment

    nodes = AllocationNodes(environment)
    running = {member.name: member for member in Members(session, nodes).read()}
    published = PublishedAssignment(session, nodes)
    generation = published.generation()
    lists = published.read(generation.number).lists() if generation is not None else {}
    found = []
    for name in sorted({*running, *lists}):
        member = running.get(name)
        state: Literal["serves", "waits", "draining", "gone"] = "serves"
        if member is None:
            state = "gone"
        elif member.draining:
            state = "draining"
        elif name not in lists:
            state = "waits"
        served = lists.get(name, {}).items()
        partitions = [f"{queue}/{number}" for queue, numbers in served for number in numbers]
        queues = sorted(member.queues) if member is not None else ()
        found.append(WorkerSnapshot(name, state, tuple(partitions), tuple(queues)))
    return found


def worker_of(partition: str, workers: Iterable[WorkerSnapshot]) -> str:
    """Return the name of the worker that serves a partition such as ``push/3``; "" without one."""
    return next((worker.name for worker in workers if partition in worker.partitions), "")
