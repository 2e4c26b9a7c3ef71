"""The published assignment: one folder per generation, and a node that names the generation in force.

::

    …/serverlist/0000000007/<worker>    compressed: the partitions that the worker serves
    …/generation                        the generation in force; workers watch this node

All lists of a generation are written before the flip of ``generation``, so a worker never reads a part of an
assignment. The former generation stays for the workers that are still reading it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kazoo.exceptions import NoNodeError

from celery_dq.allocation.assignment import Assignment, Served, pack, unpack
from celery_dq.errors import CorruptRecord, NotElected
from celery_dq.znodes import AllocationNodes
from celery_dq.zookeeper.multi_read import existing, read_all
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import (
    TransactionRefused,
    batches,
    create,
    delete,
    set_data,
    transact,
)

__all__ = ["Generation", "PublishedAssignment"]


@dataclass(frozen=True)
class Generation:
    """One published assignment.

    Attributes:
        number: From 1; 0 before the first one.
        token: Fencing token of the allocator.
        since: Wall time of the publication, seconds since 1970.
        workers: Number of workers that serve partitions.
        partitions: Number of partitions.
        moved: Number of partitions that changed their worker.
    """

    number: int = 0
    token: int = 0
    since: float = 0.0
    workers: int = 0
    partitions: int = 0
    moved: int = 0


class PublishedAssignment:
    """Reads and writes the published assignment.

    Args:
        session: The session.
        nodes: The nodes of the allocation.
    """

    def __init__(self, session: Session, nodes: AllocationNodes) -> None:
        self._session = session
        self._nodes = nodes
        #: The transaction that put the generation in force which was read last.
        self.flipped_in = 0

    # -- reading

    def generation(self, watch: Callable[[Any], None] | None = None) -> Generation | None:
        """Return the generation in force; None before the first one.

        Args:
            watch: Called in the connection's thread at the next flip.

        Raises:
            ZooKeeperUnreachable: ZooKeeper does not answer.
        """
        return self._generation(watch)[0]

    def _generation(self, watch: Callable[[Any], None] | None = None) -> tuple[Generation | None, int]:
        path = self._nodes.generation
        if self._ask(lambda client: client.exists_async(path, watch)) is None:
            return None, -1
        data, stat = self._ask(lambda client: client.get_async(path))
        self.flipped_in = stat.mzxid
        try:
            return Generation(**json.loads(data)), stat.version
        except (TypeError, ValueError):
            raise CorruptRecord(
                f"{path} holds {data[:80]!r} instead of a generation: delete the node"
            ) from None

    def served_by(self, worker: str, generation: int) -> Served:
        """Return what a worker serves in a generation: nothing if the generation has no list of it.

        Raises:
            ZooKeeperUnreachable: ZooKeeper does not answer.
        """
        path = self._nodes.list_of(generation, worker)
        try:
            data, _ = self._ask(lambda client: client.get_async(path))
        except NoNodeError:
            return {}
        return _served(data)

    def read(self, generation: int) -> Assignment:
        """Return the whole assignment of a generation.

        Raises:
            ZooKeeperUnreachable: ZooKeeper does not answer.
        """
        folder = self._nodes.lists(generation)
        names = self._session.children(folder, self._session.timeout_s)
        answers = read_all(self._session, [f"{folder}/{name}" for name in names], self._session.timeout_s)
        servers = {}
        for name, (data, _) in existing(names, answers):
            for queue, numbers in _served(data).items():
                servers.update({(queue, number): self._nodes.worker_of(name) for number in numbers})
        return Assignment(servers)

    # -- writing

    def publish(self, assignment: Assignment, former: Assignment, token: int, since: float) -> Generation:
        """Write the lists of the next generation, and put it in force.

        Args:
            assignment: The new assignment.
            former: The assignment in force, to count the partitions that move.
            token: Fencing token of the allocator.
            since: Wall time.

        Raises:
            NotElected: A later allocator has published.
            MessageTooLarge: The list of one worker is larger than ZooKeeper takes; nothing changed.
            ZooKeeperUnreachable: ZooKeeper does not answer; the flip may have been made.
        """
        nodes, session = self._nodes, self._session
        current, version = self._generation()
        if current is not None and current.token > token:
            raise NotElected(
                f"generation {current.number} is of the later allocator with token {current.token}"
            )
        self._ask(lambda client: client.ensure_path_async(nodes.serverlist))
        folders = self._ask(lambda client: client.get_children_async(nodes.serverlist))
        # An allocator that was lost may have left the folder of a generation that never came into force.
        taken = [int(folder) for folder in folders]
        number = max([current.number if current else 0, *taken]) + 1
        lists = assignment.lists()
        generation = Generation(
            number, token, since, len(lists), len(assignment.servers), former.moved(assignment)
        )
        steps = [create(nodes.lists(number))]
        steps += [create(nodes.list_of(number, worker), pack(served)) for worker, served in lists.items()]
        for batch in batches(steps):
            transact(session, batch, session.timeout_s)
        data = json.dumps(asdict(generation)).encode()
        flip = (
            create(nodes.generation, data) if current is None else set_data(nodes.generation, data, version)
        )
        try:
            transact(session, [flip], session.timeout_s)
        except TransactionRefused as refused:
            raise NotElected(
                f"another allocator has published before generation {number}: {refused}"
            ) from None
        for old in taken:
            if current is None or old != current.number:
                self._delete(old)
        return generation

    def _delete(self, number: int) -> None:
        """Delete the lists of an older generation; the next publication deletes the rest after a failure."""
        folder = self._nodes.lists(number)
        with contextlib.suppress(NoNodeError, TransactionRefused):
            names = self._ask(lambda client: client.get_children_async(folder))
            for batch in batches([*(delete(f"{folder}/{name}") for name in names), delete(folder)]):
                transact(self._session, batch, self._session.timeout_s)

    def _ask(self, request: Callable[..., Any]) -> Any:
        return self._session.ask(request, self._session.timeout_s)


def _served(data: bytes) -> Served:
    try:
        lists: dict[str, Any] = unpack(data)
        return {queue: tuple(map(int, numbers)) for queue, numbers in lists.items()}
    except (TypeError, ValueError) as error:
        raise CorruptRecord(f"the list of a worker's partitions is unreadable: {error}") from None
