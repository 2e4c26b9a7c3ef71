"""The workers that run: ephemeral nodes under ``running/``, each with the queues of its worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from kazoo.exceptions import NodeExistsError, NoNodeError

from celery_dq.allocation.assignment import RunningWorker, pack, unpack
from celery_dq.errors import CorruptRecord, ZooKeeperUnreachable
from celery_dq.znodes import AllocationNodes
from celery_dq.zookeeper.multi_read import existing
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import ask_all, check_size, create

__all__ = ["Members", "Registration"]


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
        unknown = [name for name in names if name not in self._known]
        found = dict(self._known)
        self._changed.difference_update(unknown)
        answers = ask_all(
            session,
            lambda client: [client.get_async(f"{folder}/{name}", self._on_node) for name in unknown],
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

    def _on_node(self, event: Any) -> None:
        name = str(event.path or "").rpartition("/")[2]
        self._changed.add(name)
        self._known.pop(name, None)
        self._on_change()


def _age(entry: tuple[int, RunningWorker]) -> int:
    return entry[0]
