"""Two ways to own a node while it is consumed: by a lock, or by deleting the node first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kazoo.exceptions import KazooException, NoAuthError, NoNodeError

from celery_dq.curator.framing import Decoder
from celery_dq.curator.names import Grammar
from celery_dq.errors import DQError, ZooKeeperUnreachable
from celery_dq.shown import shown_logger
from celery_dq.znodes import PRESENCES
from celery_dq.zookeeper.idempotent_writer import IdempotentWriter
from celery_dq.zookeeper.item_locks import FinishOutcome, ItemLocks, LockedItem, WantedItem
from celery_dq.zookeeper.multi_read import read_all
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import TransactionRefused, ask_all, create, delete, failure_of

__all__ = ["DeletedOwnership", "OwnedItems", "ItemOwnership", "LockedOwnership", "Node"]

logger = shown_logger(__name__)

#: Why a node is left in the queue.
DENIED = "its ACL denies this session"
#: Seconds for which a consumer without locks tries to find out whether it has deleted the nodes that it read.
DOUBT_S = 300.0


class Node(NamedTuple):
    """A node of a queue with its data.

    Attributes:
        name: Name of the node.
        data: Data of the node.
        held: The lock on the node; None without locks.
    """

    name: str
    data: bytes
    held: LockedItem | None


class OwnedItems(NamedTuple):
    """The result of an attempt to own nodes.

    Attributes:
        nodes: The nodes that are owned now.
        locked: Names of nodes that other consumers own.
        left: Names of nodes that stay in the queue, because they cannot be decoded or their ACL denies
            access.
    """

    nodes: list[Node]
    locked: list[str]
    left: list[str]


class ItemOwnership(Protocol):
    """How nodes are owned while they are consumed.

    Every call may raise ZooKeeperUnreachable and may then be repeated.
    """

    def take(self, names: Sequence[str]) -> OwnedItems:
        """Own those of `names` that are free."""

    def drop(self, names: Sequence[str]) -> None:
        """End the ownership of all `names`, after a :meth:`take` that raised."""

    def alive(self, node: Node) -> bool:
        """Whether the node is still owned, as far as known; sends no request."""

    def finish(self, nodes: Sequence[Node]) -> list[FinishOutcome]:
        """Delete nodes that were consumed."""

    def requeue(self, node: Node, data: bytes) -> FinishOutcome:
        """Move a node with new data to the end of the queue, with its id, priority or due time."""

    def release(self, nodes: Sequence[Node]) -> None:
        """Return nodes that were not consumed."""

    def read(self, name: str) -> Node | None:
        """Read a node without owning it; None if it is owned by a consumer or gone."""

    def remove(self, name: str) -> bool:
        """Delete a free node; return False if it is owned by a consumer or gone."""

    def watch(self, names: Sequence[str], wake: Callable[[str], None]) -> list[str]:
        """Call `wake` with each of `names` when its ownership ends; return the names that are free now."""

    def present(self, names: Sequence[str]) -> list[str]:
        """Return those of `names` that are in the queue."""

    def close(self) -> None:
        """End the ownership of all nodes."""


class LockedOwnership:
    """Owns a node by an ephemeral lock. The node is deleted after consumption, and free if its owner dies."""

    def __init__(
        self,
        session: Session,
        path: str,
        lock_path: str,
        grammar: Grammar,
        decoder: Decoder,
        timeout_s: float,
    ) -> None:
        self._decoder = decoder
        self._session = session
        self._path = path
        self._lock_path = lock_path
        self._grammar = grammar
        self._timeout_s = timeout_s
        self._item_locks = ItemLocks(session, PRESENCES, timeout_s=timeout_s)

    def take(self, names: Sequence[str]) -> OwnedItems:
        """Lock and read as many of `names` as are free."""
        taken = self._item_locks.take([self._wanted(name) for name in names])
        nodes = [Node(held.name, held.data, held) for held in taken.held]
        left = [node for node in nodes if not self._decoder.readable(node.name, node.data)]
        if left:
            self.release(left)
            nodes = [node for node in nodes if node not in left]
        denied = [each.name for each in taken.denied]
        for name in denied:
            self._decoder.pass_over(name, DENIED)
        return OwnedItems(
            nodes, [each.name for each in taken.locked], [*denied, *(node.name for node in left)]
        )

    def drop(self, names: Sequence[str]) -> None:
        """Delete those of the locks that this session holds."""
        self._item_locks.drop([self._wanted(name) for name in names])

    def alive(self, node: Node) -> bool:
        """Whether the session that created the lock is still the current one."""
        return node.held is not None and self._item_locks.holds(node.held)

    def finish(self, nodes: Sequence[Node]) -> list[FinishOutcome]:
        """Delete the nodes and their locks."""
        return self._item_locks.finish([node.held for node in nodes if node.held is not None])

    def requeue(self, node: Node, data: bytes) -> FinishOutcome:
        """Delete the node and its lock and create the new node, in one transaction."""
        assert node.held is not None
        again = create(f"{self._path}/{self._grammar.prefix(node.name)}", data, sequence=True)
        return self._item_locks.replace(node.held, [again])

    def release(self, nodes: Sequence[Node]) -> None:
        """Delete the locks."""
        self._item_locks.drop([node.held for node in nodes if node.held is not None])

    def watch(self, names: Sequence[str], wake: Callable[[str], None]) -> list[str]:
        """Watch the locks of `names`; return the names without a lock."""
        wanted = [self._wanted(name) for name in names]
        return [each.name for each in self._item_locks.watch(wanted, lambda each: wake(each.name))]

    def present(self, names: Sequence[str]) -> list[str]:
        """Return those of `names` that are in the queue."""
        paths = [f"{self._path}/{name}" for name in names]
        stats = ask_all(
            self._session, lambda client: [client.exists_async(path) for path in paths], self._timeout_s
        )
        return [name for name, stat in zip(names, stats, strict=True) if stat is not None]

    def read(self, name: str) -> Node | None:
        """Read the node if it is not locked."""
        paths = (f"{self._lock_path}/{name}", f"{self._path}/{name}")
        locked, answer = ask_all(
            self._session,
            lambda client: [client.exists_async(paths[0]), client.get_async(paths[1])],
            self._timeout_s,
        )
        if locked is not None or isinstance(answer, KazooException):
            return None
        return Node(name, answer[0], None)

    def remove(self, name: str) -> bool:
        """Lock and delete a node; return False if another consumer has locked it, or it is gone."""
        try:
            grip = self.take([name])
        except ZooKeeperUnreachable:
            # The node may be locked now, and no consumer would unlock it.
            self.drop([name])
            raise
        return self.finish(grip.nodes) == [FinishOutcome.DONE]

    def close(self) -> None:
        """Delete the presence of this session."""
        self._item_locks.close()

    def _wanted(self, name: str) -> WantedItem:
        return WantedItem(f"{self._path}/{name}", f"{self._lock_path}/{name}")


class DeletedOwnership:
    """Owns a node by having deleted it. The node is lost if its owner dies."""

    def __init__(
        self,
        session: Session,
        path: str,
        grammar: Grammar,
        writer: IdempotentWriter,
        decoder: Decoder,
        timeout_s: float,
    ) -> None:
        self._session = session
        self._path = path
        self._grammar = grammar
        self._writer = writer
        self._decoder = decoder
        self._timeout_s = timeout_s

    def take(self, names: Sequence[str]) -> OwnedItems:
        """Read and delete those of `names` that exist."""
        answers = read_all(self._session, [f"{self._path}/{name}" for name in names], self._timeout_s)
        nodes, left = [], []
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, NoNodeError):
                continue
            if isinstance(answer, NoAuthError):
                self._decoder.pass_over(name, DENIED)
                left.append(name)
                continue
            if isinstance(answer, KazooException):
                raise failure_of("read", f"{self._path}/{name}", answer)
            if not self._decoder.readable(name, answer[0]):
                left.append(name)
                continue
            nodes.append((Node(name, answer[0], None), delete(f"{self._path}/{name}", answer[1].version)))
        deleted: list[Node] = []
        if nodes:
            # A long timeout: a node that was deleted by a request without an answer would be lost.
            outcomes = self._writer.commit_each([[step] for _node, step in nodes], DOUBT_S)
            for (node, _step), outcome in zip(nodes, outcomes, strict=True):
                if not isinstance(outcome, DQError):
                    deleted.append(node)
                elif not isinstance(outcome, TransactionRefused):
                    logger.error(
                        "Node %s/%s may be lost: its deletion got no clear answer (%s).",
                        self._path,
                        node.name,
                        outcome,
                        extra={"event": "curator_node_in_doubt"},
                    )
        return OwnedItems(deleted, [], left)

    def drop(self, names: Sequence[str]) -> None:
        """Do nothing: nodes that were not deleted are not owned."""

    def alive(self, node: Node) -> bool:
        """Return True: no other consumer can get a deleted node."""
        return True

    def finish(self, nodes: Sequence[Node]) -> list[FinishOutcome]:
        """Do nothing: the nodes are already deleted."""
        return [FinishOutcome.DONE] * len(nodes)

    def requeue(self, node: Node, data: bytes) -> FinishOutcome:
        """Create the node again at the end of the queue."""
        self._writer.commit(
            [create(f"{self._path}/{self._grammar.prefix(node.name)}", data, sequence=True)], self._timeout_s
        )
        return FinishOutcome.DONE

    def release(self, nodes: Sequence[Node]) -> None:
        """Create the nodes again at the end of the queue."""
        for node in nodes:
            self.requeue(node, node.data)

    def watch(self, names: Sequence[str], wake: Callable[[str], None]) -> list[str]:
        """Return all names: without locks, no consumer holds a node that is in the queue."""
        return list(names)

    def present(self, names: Sequence[str]) -> list[str]:
        """Return all names without a request: an attempt to take them finds out."""
        return list(names)

    def read(self, name: str) -> Node | None:
        """Read the node."""
        path = f"{self._path}/{name}"
        (answer,) = ask_all(self._session, lambda client: [client.get_async(path)], self._timeout_s)
        return None if isinstance(answer, KazooException) else Node(name, answer[0], None)

    def remove(self, name: str) -> bool:
        """Delete a node; return False if it is gone."""
        try:
            self._writer.commit([delete(f"{self._path}/{name}")], self._timeout_s)
        except TransactionRefused:
            return False
        return True

    def close(self) -> None:
        """Do nothing: this class keeps no state in ZooKeeper."""
