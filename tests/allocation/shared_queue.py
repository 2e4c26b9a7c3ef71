"""A queue whose partitions real workers share, as Redis and ZooKeeper see it."""

from __future__ import annotations

from typing import Any

from celery_dq.allocation.assignment import compute
from celery_dq.allocation.nodes import Generation, Members, PublishedAssignment
from celery_dq.keys import PartitionKeys
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.store.home import home_of
from celery_dq.znodes import AllocationNodes
from celery_dq.zookeeper.session import Session
from tests.broker.worker_app import WorkerApp

QUEUE = "shared"
#: Shortest session that the settings allow, in seconds.
SESSION_S = 1.0


def tenants(partitions: int, each: int = 1) -> list[str]:
    """Names of tenants of which `each` live in each partition, in the order of the partitions."""
    homes: dict[int, list[str]] = {number: [] for number in range(partitions)}
    number = 0
    while any(len(names) < each for names in homes.values()):
        home = homes[home_of(f"shop-{number}", partitions)]
        if len(home) < each:
            home.append(f"shop-{number}")
        number += 1
    return [name for names in homes.values() for name in names]


class SharedQueue(WorkerApp):
    """A queue of eight partitions, and workers that share it.

    Args:
        server: The Redis server.
        hosts: The host list of ZooKeeper.
        partitions: Number of partitions.
        conf: Further settings.
    """

    def __init__(self, server: RedisServer, hosts: str, partitions: int = 8, **conf: Any) -> None:
        settings = {
            "task_default_queue": QUEUE,
            "dq_queues": {QUEUE: {"partitions": partitions}},
            "dq_allocation": True,
            "dq_allocation_join_delay": 0.3,
            "dq_election": f"zookeeper://{hosts}",
            "dq_election_session": SESSION_S,
            **conf,
        }
        super().__init__(server, **settings)
        self.partitions = partitions
        self.session = Session(hosts, timeout_s=2.0)
        self.nodes = AllocationNodes("online")
        self.published = PublishedAssignment(self.session, self.nodes)
        self.members = Members(self.session, self.nodes)

    @property
    def generation(self) -> Generation:
        return self.published.generation() or Generation()

    def assigned(self) -> dict[str, list[int]]:
        """The partitions of each worker in the generation in force."""
        lists = self.published.read(self.generation.number).lists()
        return {worker: sorted(queues[QUEUE]) for worker, queues in lists.items()}

    def wait_assigned(self, *names: str, timeout_s: float = 30.0) -> dict[str, list[int]]:
        """Wait until exactly these workers have partitions, and each partition has a worker."""

        def is_there() -> bool:
            found = self.assigned()
            return set(found) == set(names) and sum(map(len, found.values())) == self.partitions

        wait_until(is_there, timeout_s, what=lambda: f"{names}; assigned: {self.assigned()}")
        return self.assigned()

    def wait_settled(self, *names: str, timeout_s: float = 60.0) -> None:
        """Wait until exactly these workers run, and their assignment is in force."""

        def is_settled() -> bool:
            members = self.members.read()
            lists = self.published.read(self.generation.number).lists()
            return [member.name for member in members] == sorted(names) and lists == compute(members).lists()

        wait_until(is_settled, timeout_s, what=lambda: f"{names}; {self.assigned()}; {self.members.read()}")

    def leases(self) -> list[int]:
        """How many consumers have a lease on each partition."""
        keys = [PartitionKeys("online", QUEUE, number) for number in range(self.partitions)]
        return [self.client.zcard(each.leases) for each in keys]

    def wait_leased_once(self) -> None:
        """Wait until one worker serves each partition."""
        wait_until(lambda: self.leases() == [1] * self.partitions, what=lambda: str(self.leases()))

    def stored(self) -> int:
        keys = [PartitionKeys("online", QUEUE, number) for number in range(self.partitions)]
        return sum(self.client.hlen(each.messages) for each in keys)

    def close(self) -> None:
        self.session.close()
        super().close()
