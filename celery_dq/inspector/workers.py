"""Snapshots of workers, read from their leases and from ZooKeeper, and of leaderships. No worker is asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from celery_dq.inspector.queues import QueueSnapshot, merged
from celery_dq.inspector.redis_values import moment
from celery_dq.leadership.elector import Election
from celery_dq.znodes import AllocationNodes

if TYPE_CHECKING:
    from celery_dq.zookeeper.session import Session


@dataclass(frozen=True)
class WorkerSnapshot:
    """A worker.

    Attributes:
        name: Celery's name of the worker; of another consumer, its host.
        state: ``alive``, or ``lost``: its leases have expired. Of a worker that shares partitions with others
            (``dq_allocation``): ``serves``; ``waits`` for its first partitions; ``draining``; or ``gone``:
            its partitions are about to get another worker.
        partitions: The partitions that it serves by the allocation, such as ``push/3``.
        queues: The queues that it consumes.
        held: Number of its in-flight messages.
        lease_s: Seconds until its longest lease expires; negative after that; None without a lease.
        consumer: Its name in the leases, with process id and a random part; "" without a lease.
    """

    name: str
    state: Literal["alive", "lost", "serves", "waits", "draining", "gone"]
    partitions: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()
    held: int = 0
    lease_s: float | None = None
    consumer: str = ""


def workers_of(
    queues: Iterable[QueueSnapshot], sharing: Iterable[WorkerSnapshot] = ()
) -> list[WorkerSnapshot]:
    """Return the workers that have a lease on these queues, and those that share partitions."""
    pairs = [(each, queue.name) for queue in queues for each in queue.workers]
    shared = {each.name: each for each in sharing}
    workers = []
    for consumer in merged(each for each, _ in pairs):
        name, lease_s = consumer.worker, consumer.lease_s
        known = shared.get(name) or WorkerSnapshot(name, "alive" if consumer.is_alive else "lost")
        consumed = {*known.queues, *(queue for each, queue in pairs if each.name == consumer.name)}
        workers.append(
            replace(
                known,
                queues=tuple(sorted(consumed)),
                held=consumer.held,
                lease_s=lease_s,
                consumer=consumer.name,
            )
        )
    workers += [each for name, each in shared.items() if all(name != row.name for row in workers)]
    return sorted(workers, key=lambda each: (each.name, each.consumer))


def sharing_workers(session: Session, environment: str) -> list[WorkerSnapshot]:
    """Read the running workers that share partitions, and the assignment in force.

    Raises:
        ZooKeeperUnreachable: ZooKeeper does not answer.
    """
    # kazoo is imported only if workers share partitions.
    from celery_dq.allocation.nodes import Members, PublishedAssignment

    nodes = AllocationNodes(environment)
    running = {member.name: member for member in Members(session, nodes).read()}
    published = PublishedAssignment(session, nodes)
    generation = published.generation()
    lists = published.read(generation.number).lists() if generation is not None else {}
    workers = []
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
        workers.append(WorkerSnapshot(name, state, tuple(partitions), tuple(queues)))
    return workers


def worker_of(partition: str, workers: Iterable[WorkerSnapshot]) -> str:
    """Return the name of the worker that serves a partition such as ``push/3``; "" without one."""
    return next((worker.name for worker in workers if partition in worker.partitions), "")


@dataclass(frozen=True)
class LeaderSnapshot:
    """The state of one leadership.

    Attributes:
        name: Name of the singleton queue, or of another election.
        state: ``leads``, or ``vacant``: there was no election yet, the last leader has handed over, or its
            lease or session has ended.
        leader: Name of the leading candidate: worker, host, process id and a random part; "" when vacant.
        token: Fencing token of the term; 0 when vacant.
        since: When the term began; None when vacant.
        candidates: Names of the living candidates, the leader first.
    """

    name: str
    state: Literal["leads", "vacant"]
    leader: str = ""
    token: int = 0
    since: datetime | None = None
    candidates: tuple[str, ...] = ()

    @property
    def is_present(self) -> bool:
        """Whether there is a leader."""
        return self.state == "leads"

    @property
    def token_in_force(self) -> int | None:
        """The fencing token; None without a leader."""
        return self.token if self.is_present else None


def leader_snapshot(election: Election) -> LeaderSnapshot:
    """Read the state of the leadership of an election, without becoming a candidate."""
    leader, candidates = election.leader(), tuple(election.candidates())
    # ZooKeeper keeps the name of the last leader. A leader whose session has ended is not a candidate, and
    # one that has resigned is not the first candidate.
    if leader is None or candidates[:1] != (leader.who,):
        return LeaderSnapshot(election.name, "vacant", candidates=candidates)
    since = moment(leader.since * 1e6)
    return LeaderSnapshot(election.name, "leads", leader.who, leader.token, since, candidates)
