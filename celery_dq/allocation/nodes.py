"""The workers that run, and the published assignment: one folder per generation, of which one is in force.

::

    …/running/<worker>|<session>        ephemeral: the queues of a worker that runs
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
from functools import partial
from typing import Any

from kazoo.exceptions import NodeExistsError, NoNodeError

from celery_dq.allocation.assignment import Assignment, RunningWorker, Served, pack, unpack
from celery_dq.errors import CorruptRecord, NotElected, ZooKeeperUnreachable
from celery_dq.znodes import AllocationNodes
from celery_dq.zookeeper.multi_read import existing, read_all
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import (
    TransactionRefused,
    ask_all,
    batches,
    check_size,
    create,
    delete,
    set_data,
    transact,
)

__all__ = ["Generation", "PublishedAssignment", "Members", "Registration"]


class Registration:
    """The node of one worker. Used by one thread.

    Args:
        session: The session that keeps the node.
        nodes: The nodes of the allocation.
        worker: Name of the worker.
        on_lost: Called in the connection's thread when the node is gone; :meth:`write` makes it again.
    """

    def __init__(
        self,
        session: Session,
        nodes: AllocationNodes,
        worker: str,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._session = session
        self._nodes = nodes
        self._worker = worker
        self._on_lost = on_lost
        #: The session and the data of the node; None if the node may be missing or other.
        self._written: tuple[int, bytes] | None = None
        #: Whether there may be a node.
        self.may_exist = False

    def write(self, member: RunningWorker) -> bool:
        """Create or change the node; return whether a request was needed.

        Raises:
            ZooKeeperUnreachable: ZooKeeper does not answer. The node may have been written.
            MessageTooLarge: The worker consumes more queues than a node can hold.
        """
        data = pack({"queues": dict(member.queues), "draining": member.draining})
        self._session.open(self._session.timeout_s)
        session_id = self._session.id
        if self._written == (session_id, data) or session_id is None:
            return False
        # An error may come after the write.
        self._written, self.may_exist = None, True
        path = self._nodes.member(self._worker, session_id)
        # A request that is too large would break the connection.
        check_size([create(path, data)])
        try:
            stat = self._ask(
                lambda client: client.create_async(
                    path, data, ephemeral=True, makepath=True, include_data=True
                )
            )[1]
        except NodeExistsError:
            stat = self._ask(lambda client: client.set_async(path, data))
        if stat.ephemeralOwner != session_id:
            raise ZooKeeperUnreachable(f"the session of worker {self._worker} changed while it registered")
        # An operator may delete the node, and perhaps has.
        if self._ask(lambda client: client.exists_async(path, self._on_node)) is not None:
            self._written = session_id, data
        return True

    def _on_node(self, event: Any) -> None:
        self._written = None
        self._on_lost()

    def remove(self) -> None:
        """Delete the node, so that the partitions of the worker go to other ones at once.

        Raises:
            ZooKeeperUnreachable: ZooKeeper does not answer. The node ends with the session.
        """
        # The answer may be lost after the deletion.
        self._written = None
        session_id = self._session.id
        if session_id is not None:
            with contextlib.suppress(NoNodeError):
                path = self._nodes.member(self._worker, session_id)
                self._ask(lambda client: client.delete_async(path))
        self.may_exist = False

    def _ask(self, request: Callable[[Any], Any]) -> Any:
        return self._session.ask(request, self._session.timeout_s)


class Members:
    """Reads the running workers, and reports changes. Used by one thread.

    Args:
        session: The session of the reader.
        nodes: The nodes of the allocation.
        on_change: Called in the connection's thread when the next :meth:`read` may return other members.
    """

    def __init__(
        self, session: Session, nodes: AllocationNodes, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._session = session
        self._nodes = nodes
        self._on_change = on_change
        #: By node: transaction that created it, and the member; only nodes whose watch has not fired.
        self._known: dict[str, tuple[int, RunningWorker]] = {}
        #: Nodes that have changed since they were asked for, perhaps before their answers were read.
        self._changed: set[str] = set()
        self._session_id: int | None = None
        #: The transaction that created the node of each member of the last reading.
        self.created: dict[str, int] = {}

    def read(self) -> list[RunningWorker]:
        """Return the running workers, by name. Of two nodes of one worker, the newer one counts.

        Raises:
            ZooKeeperUnreachable: ZooKeeper does not answer.
        """
        session, timeout_s = self._session, self._session.timeout_s
        session.open(timeout_s)
        if session.id != self._session_id:
            # The watches have ended with their session.
            self._known, self._session_id = {}, session.id
        folder = self._nodes.running
        try:
            names = session.ask(
                lambda client: client.get_children_async(folder, self._on_children), timeout_s
            )
        except NoNodeError:
            session.ask(lambda client: client.ensure_path_async(folder), timeout_s)
            names = session.ask(
                lambda client: client.get_children_async(folder, self._on_children), timeout_s
            )
        # A watch may fire at any time, and remove a member from the known ones.
        found = dict(self._known)
        unknown = [name for name in names if name not in found]
        self._changed.difference_update(unknown)
        answers = ask_all(
            session,
            lambda client: [
                client.get_async(f"{folder}/{name}", partial(self._on_node, name)) for name in unknown
            ],
            timeout_s,
        )
        for name, (data, stat) in existing(unknown, answers):
            found[name] = self._known[name] = stat.czxid, self._member(name, data)
        members: dict[str, tuple[int, RunningWorker]] = {}
        for name in set(names) & found.keys():
            created, member = found[name]
            members[member.name] = max(members.get(member.name, (0, member)), (created, member), key=_age)
        for name in self._known.keys() - set(names) | self._changed:
            self._known.pop(name, None)
        self._changed.intersection_update(names)
        self.created = {name: created for name, (created, _) in members.items()}
        return [members[name][1] for name in sorted(members)]

    def _member(self, node: str, data: bytes) -> RunningWorker:
        worker = self._nodes.worker_of(node)
        try:
            fields: dict[str, Any] = unpack(data)
            queues = {str(queue): int(count) for queue, count in fields["queues"].items()}
            return RunningWorker(worker, queues, bool(fields["draining"]))
        except (CorruptRecord, KeyError, TypeError, ValueError, AttributeError):
            # A worker of another release, or another program, gets nothing.
            return RunningWorker(worker)

    def _on_children(self, _event: Any) -> None:
        self._on_change()

    def _on_node(self, name: str, _event: Any) -> None:
        # The event has no path if the watch has ended with its connection.
        self._changed.add(name)
        self._known.pop(name, None)
        self._on_change()


def _age(entry: tuple[int, RunningWorker]) -> int:
    return entry[0]


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
        chroot = session.open(session.timeout_s).chroot
        for step in steps:
            check_size([step], chroot)
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
