"""Two ways to own a node while it is consumed: by a lock, or by deleting the node first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kazoo.exceptions import KazooException, NoAuthError, NoNodeError

from celery_dq.clock import Clock
from celery_dq.curator.framing import Decoder
from celery_dq.curator.names import Grammar
from celery_dq.errors import DQError, ZooKeeperUnreachable
from celery_dq.shown import shown_logger
from celery_dq.znodes import PRESENCES
from celery_dq.zookeeper.idempotent_writer import IdempotentWriter, Stamp
from celery_dq.zookeeper.item_locks import FinishOutcome, ItemLocks, LockedItem, WantedItem
from celery_dq.zookeeper.multi_read import read_all
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import (
    MAX_REQUEST,
    Step,
    TransactionRefused,
    ask_all,
    create,
    delete,
    failure_of,
)

__all__ = ["DeletedOwnership", "OwnedItems", "ItemOwnership", "LockedOwnership", "Node", "QueueFolder"]

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
        stamps: Receives the stamp of the request that requeues or releases the node without locks, so that a
            repeated request does not create it twice.
    """

    name: str
    data: bytes
    held: LockedItem | None
    stamps: dict[str, Stamp]


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


@dataclass(frozen=True)
class QueueFolder:
    """The folder of a queue, and what all parts of the queue need to use it.

    Attributes:
        session: The session that sends the requests.
        path: The folder; created if it is missing.
        grammar: The names of the nodes.
        decoder: Decodes the items of a node.
        clock: Wall time for due times, monotonic time for waits.
        timeout_s: Seconds to wait for an answer.
    """

    session: Session
    path: str
    grammar: Grammar
    decoder: Decoder
    clock: Clock
    timeout_s: float


class ItemOwnership(ABC):
    """How nodes are owned while they are consumed.

    Every call may raise ZooKeeperUnreachable and may then be repeated. The methods that are not abstract do
    nothing: an owned node is not in the queue any more, and no consumer holds one that is.

    Args:
        folder: The folder of the queue.
    """

    def __init__(self, folder: QueueFolder) -> None:
        self._folder = folder

    @abstractmethod
    def take(self, names: Sequence[str]) -> OwnedItems:
        """Own those of `names` that are free."""

    def drop(self, names: Sequence[str]) -> None:  # noqa: B027 - see the class
        """End the ownership of all `names`, after a :meth:`take` that raised."""

    def alive(self, node: Node) -> bool:
        """Whether the node is still owned, as far as known; sends no request."""
        return True

    def finish(self, nodes: Sequence[Node]) -> list[FinishOutcome]:
        """Delete nodes that were consumed."""
        return [FinishOutcome.DONE] * len(nodes)

    @abstractmethod
    def requeue(self, node: Node, data: bytes) -> FinishOutcome:
        """Move a node with new data to the end of the queue, with its id, priority or due time."""

    @abstractmethod
    def release(self, nodes: Sequence[Node]) -> None:
        """Return nodes that were not consumed."""

    @abstractmethod
    def read(self, name: str) -> Node | None:
        """Read a node without owning it; None if it is owned by a consumer or gone."""

    @abstractmethod
    def remove(self, name: str) -> bool:
        """Delete a free node; return False if it is owned by a consumer or gone."""

    def watch(self, names: Sequence[str], wake: Callable[[str], None]) -> list[str]:
        """Call `wake` with each of `names` when its ownership ends; return the names that are free now."""
        return list(names)

    def present(self, names: Sequence[str]) -> list[str]:
        """Return those of `names` that may be in the queue."""
        return list(names)

    def close(self) -> None:  # noqa: B027 - see the class
        """End the ownership of all nodes."""

    def _path(self, name: str) -> str:
        return f"{self._folder.path}/{name}"

    def _ask_all(self, send: Callable[[Any], list[Any]]) -> list[Any]:
        return ask_all(self._folder.session, send, self._folder.timeout_s)

    def _copy(self, node: Node, data: bytes) -> Step:
        """Return the creation of a node at the end of the queue, with its id, priority or due time."""
        return create(self._path(self._folder.grammar.prefix(node.name)), data, sequence=True)


class LockedOwnership(ItemOwnership):
    """Owns a node by an ephemeral lock. The node is deleted after consumption, and free if its owner dies.

    Args:
        folder: The folder of the queue.
        lock_path: The folder of the locks.
    """

    def __init__(self, folder: QueueFolder, lock_path: str) -> None:
        super().__init__(folder)
        self._lock_path = lock_path
        self._item_locks = ItemLocks(folder.session, PRESENCES, timeout_s=folder.timeout_s)

    def take(self, names: Sequence[str]) -> OwnedItems:
        """Lock and read as many of `names` as are free."""
        taken = self._item_locks.take([self._wanted(name) for name in names])
        nodes = [Node(held.name, held.data, held, {}) for held in taken.held]
        left = [node for node in nodes if not self._folder.decoder.readable(node.name, node.data)]
        if left:
            self.release(left)
            nodes = [node for node in nodes if node not in left]
        denied = [each.name for each in taken.denied]
        for name in denied:
            self._folder.decoder.pass_over(name, DENIED)
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
        return self._item_locks.replace(node.held, [self._copy(node, data)])

    def release(self, nodes: Sequence[Node]) -> None:
        """Delete the locks."""
        self._item_locks.drop([node.held for node in nodes if node.held is not None])

    def watch(self, names: Sequence[str], wake: Callable[[str], None]) -> list[str]:
        """Watch the locks of `names`; return the names without a lock."""
        wanted = [self._wanted(name) for name in names]
        return [each.name for each in self._item_locks.watch(wanted, lambda each: wake(each.name))]

    def present(self, names: Sequence[str]) -> list[str]:
        """Return those of `names` that are in the queue."""
        paths = [self._path(name) for name in names]
        stats = self._ask_all(lambda client: [client.exists_async(path) for path in paths])
        return [name for name, stat in zip(names, stats, strict=True) if stat is not None]

    def read(self, name: str) -> Node | None:
        """Read the node if it is not locked."""
        lock, path = f"{self._lock_path}/{name}", self._path(name)
        locked, answer = self._ask_all(lambda client: [client.exists_async(lock), client.get_async(path)])
        if locked is not None or isinstance(answer, KazooException):
            return None
        return Node(name, answer[0], None, {})

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
        return WantedItem(self._path(name), f"{self._lock_path}/{name}")


class DeletedOwnership(ItemOwnership):
    """Owns a node by having deleted it. The node is lost if its owner dies.

    Args:
        folder: The folder of the queue.
        writer: Deletes and creates each node once.
    """

    def __init__(self, folder: QueueFolder, writer: IdempotentWriter) -> None:
        super().__init__(folder)
        self._writer = writer

    def take(self, names: Sequence[str]) -> OwnedItems:
        """Read and delete those of `names` that exist."""
        answers = read_all(self._folder.session, [self._path(name) for name in names], self._folder.timeout_s)
        nodes, left = [], []
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, NoNodeError):
                continue
            if isinstance(answer, NoAuthError):
                self._folder.decoder.pass_over(name, DENIED)
                left.append(name)
                continue
            if isinstance(answer, KazooException):
                raise failure_of("read", self._path(name), answer)
            if not self._folder.decoder.readable(name, answer[0]):
                left.append(name)
                continue
            nodes.append((Node(name, answer[0], None, {}), delete(self._path(name), answer[1].version)))
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
                        self._folder.path,
                        node.name,
                        outcome,
                        extra={"event": "curator_node_in_doubt"},
                    )
        return OwnedItems(deleted, [], left)

    def requeue(self, node: Node, data: bytes) -> FinishOutcome:
        """Create the node again at the end of the queue."""
        self._writer.commit_stamped(
            [self._copy(node, data)], self._folder.timeout_s, node.stamps, "requeue", limit=MAX_REQUEST
        )
        return FinishOutcome.DONE

    def release(self, nodes: Sequence[Node]) -> None:
        """Create the nodes again at the end of the queue."""
        for node in nodes:
            self.requeue(node, node.data)

    def read(self, name: str) -> Node | None:
        """Read the node."""
        path = self._path(name)
        (answer,) = self._ask_all(lambda client: [client.get_async(path)])
        return None if isinstance(answer, KazooException) else Node(name, answer[0], None, {})

    def remove(self, name: str) -> bool:
        """Delete a node; return False if it is gone."""
        try:
            self._writer.commit([delete(self._path(name))], self._folder.timeout_s)
        except TransactionRefused:
            return False
        return True
