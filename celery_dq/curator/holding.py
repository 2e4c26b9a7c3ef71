"""Two ways to hold an item while it is consumed: under a lock, or by deleting it first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from kazoo.exceptions import KazooException, NoNodeError

from celery_dq.curator.decoder import Decoder
from celery_dq.curator.names import Grammar
from celery_dq.errors import DQError, ZooKeeperUnreachable
from celery_dq.znodes import PRESENCES
from celery_dq.zookeeper.custody import Custody, Held, Outcome, Wanted
from celery_dq.zookeeper.journal import Journal
from celery_dq.zookeeper.reading import read_all
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import Refused, Step, ask_all, create, delete, denied

__all__ = ["Deleting", "Grip", "Holding", "Locking", "Node"]

logger = logging.getLogger(__name__)

#: Seconds for which a consumer without locks finds out whether it has deleted what it read.
DOUBT_S = 300.0


class Node(NamedTuple):
    """A node of a queue that is held, with its data; `held` is what the holding needs to know."""

    name: str
    data: bytes
    held: Held | None


class Grip(NamedTuple):
    """What came of an attempt to hold nodes."""

    nodes: list[Node]
    #: Names that others hold.
    locked: list[str]
    #: Names that cannot be read: they are left where they are.
    left: list[str]


class Holding(Protocol):
    """How nodes are held while they are consumed. Calls raise ZooKeeperUnreachable and may be repeated."""

    def take(self, names: Sequence[str]) -> Grip:
        """Hold as many of `names` as can be had."""

    def drop(self, names: Sequence[str]) -> None:
        """Hold none of `names`, after a :meth:`take` that raised."""

    def alive(self, node: Node) -> bool:
        """Whether it is still held, as far as is known."""

    def finish(self, nodes: Sequence[Node]) -> list[Outcome]:
        """They are consumed: they go for good."""

    def requeue(self, node: Node, data: bytes) -> Outcome:
        """Put it back with `data`, last in line, with its id, priority or delay."""

    def release(self, nodes: Sequence[Node]) -> None:
        """Give them back unconsumed."""

    def read(self, name: str) -> Node | None:
        """A node that nobody holds, without holding it; None: somebody does, or it is gone."""

    def remove(self, name: str) -> bool:
        """Delete a node that nobody holds; False: somebody does, or it is gone."""

    def watch(self, names: Sequence[str], bell: Callable[[str], None]) -> list[str]:
        """Call `bell` with each of `names` when its holder lets go of it; returns those that nobody holds."""

    def present(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that are in the queue."""

    def close(self) -> None:
        """Nothing is held any more."""


class Locking:
    """Holds a node by an ephemeral lock: it is deleted once it is consumed, and free when its holder dies."""

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
        self._custody = Custody(session, PRESENCES, timeout_s=timeout_s)

    def take(self, names: Sequence[str]) -> Grip:
        """Lock and read as many of `names` as are free."""
        wanted = [self._wanted(name) for name in names]
        try:
            taken = self._custody.take(wanted)
        except Refused as refusal:
            if not isinstance(refusal.error, NoNodeError):
                raise
            # Never made, or a container that its server removed because it was empty.
            self._session.ask(lambda client: client.ensure_path_async(self._lock_path), self._timeout_s)
            taken = self._custody.take(wanted)
        nodes = [Node(name_of(held.item), held.data, held) for held in taken.held]
        left = [node for node in nodes if not self._decoder.readable(node.name, node.data)]
        if left:
            self.release(left)
            nodes = [node for node in nodes if node not in left]
        return Grip(nodes, [name_of(each.item) for each in taken.locked], [node.name for node in left])

    def drop(self, names: Sequence[str]) -> None:
        """Delete those of the locks that are ours."""
        self._custody.drop([self._wanted(name) for name in names])

    def alive(self, node: Node) -> bool:
        """Whether the session that made the lock is there."""
        return node.held is not None and self._custody.holds(node.held)

    def finish(self, nodes: Sequence[Node]) -> list[Outcome]:
        """Delete the nodes and their locks."""
        return self._custody.finish([node.held for node in nodes if node.held is not None])

    def requeue(self, node: Node, data: bytes) -> Outcome:
        """Delete the node and its lock and create it anew, in one transaction."""
        assert node.held is not None
        return self._custody.replace(node.held, [self._anew(node.name, data)])

    def release(self, nodes: Sequence[Node]) -> None:
        """Delete the locks."""
        self._custody.release([node.held for node in nodes if node.held is not None])

    def watch(self, names: Sequence[str], bell: Callable[[str], None]) -> list[str]:
        """Watch the locks of `names`: a lock goes when its holder is done, or has died."""

        def send(client: Any) -> list[Any]:
            # Reading leaves no watch behind where there is nothing; asking whether it exists would.
            return [
                client.get_async(f"{self._lock_path}/{name}", watch=lambda _event, name=name: bell(name))
                for name in names
            ]

        answers = ask_all(self._session, send, self._timeout_s)
        free = []
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, NoNodeError):
                free.append(name)
            elif isinstance(answer, KazooException):
                raise denied("read", f"{self._lock_path}/{name}", answer)
        return free

    def present(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that are in the queue."""
        paths = [f"{self._path}/{name}" for name in names]
        stats = ask_all(
            self._session, lambda client: [client.exists_async(path) for path in paths], self._timeout_s
        )
        return [name for name, stat in zip(names, stats, strict=True) if stat is not None]

    def read(self, name: str) -> Node | None:
        """The node, if it is not locked."""
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
        """Delete a node that nobody holds; False: somebody does, or it is gone."""
        try:
            grip = self.take([name])
        except ZooKeeperUnreachable:
            # It may be locked now, and nobody would know why.
            self.drop([name])
            raise
        return self.finish(grip.nodes) == [Outcome.DONE]

    def close(self) -> None:
        """End the presence."""
        self._custody.close()

    def _wanted(self, name: str) -> Wanted:
        return Wanted(f"{self._path}/{name}", f"{self._lock_path}/{name}")

    def _anew(self, name: str, data: bytes) -> Step:
        return create(f"{self._path}/{self._grammar.prefix(name)}", data, sequence=True)


class Deleting:
    """Holds a node by having deleted it: who deletes it has it, and when he dies it is lost."""

    def __init__(
        self,
        session: Session,
        path: str,
        grammar: Grammar,
        journal: Journal,
        decoder: Decoder,
        timeout_s: float,
    ) -> None:
        self._session = session
        self._path = path
        self._grammar = grammar
        self._journal = journal
        self._decoder = decoder
        self._timeout_s = timeout_s

    def take(self, names: Sequence[str]) -> Grip:
        """Read and delete as many of `names` as are there."""
        answers = read_all(self._session, [f"{self._path}/{name}" for name in names], self._timeout_s)
        nodes, left = [], []
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, NoNodeError):
                continue
            if isinstance(answer, KazooException):
                raise denied("read", f"{self._path}/{name}", answer)
            if not self._decoder.readable(name, answer[0]):
                left.append(name)
                continue
            nodes.append((Node(name, answer[0], None), delete(f"{self._path}/{name}", answer[1].version)))
        deleted: list[Node] = []
        if nodes:
            # For long: what was deleted and is not known to be is lost.
            outcomes = self._journal.commit_each([[step] for _node, step in nodes], DOUBT_S)
            for (node, _step), outcome in zip(nodes, outcomes, strict=True):
                if not isinstance(outcome, DQError):
                    deleted.append(node)
                elif not isinstance(outcome, Refused):
                    logger.error("%s/%s may be lost: %s", self._path, node.name, outcome)
        return Grip(deleted, [], left)

    def drop(self, names: Sequence[str]) -> None:
        """Nothing: what was not deleted is not held."""

    def alive(self, node: Node) -> bool:
        """Always: nobody else can have it."""
        return True

    def finish(self, nodes: Sequence[Node]) -> list[Outcome]:
        """Nothing: they are gone already."""
        return [Outcome.DONE] * len(nodes)

    def requeue(self, node: Node, data: bytes) -> Outcome:
        """Create it anew."""
        self._journal.commit(
            [create(f"{self._path}/{self._grammar.prefix(node.name)}", data, sequence=True)], self._timeout_s
        )
        return Outcome.DONE

    def release(self, nodes: Sequence[Node]) -> None:
        """Create them anew, last in line."""
        for node in nodes:
            self.requeue(node, node.data)

    def watch(self, names: Sequence[str], bell: Callable[[str], None]) -> list[str]:
        """Nobody holds anything."""
        return list(names)

    def present(self, names: Sequence[str]) -> list[str]:
        """All of them, perhaps: taking them will tell."""
        return list(names)

    def read(self, name: str) -> Node | None:
        """The node."""
        path = f"{self._path}/{name}"
        (answer,) = ask_all(self._session, lambda client: [client.get_async(path)], self._timeout_s)
        return None if isinstance(answer, KazooException) else Node(name, answer[0], None)

    def remove(self, name: str) -> bool:
        """Delete a node; False: it is gone."""
        try:
            self._journal.commit([delete(f"{self._path}/{name}")], self._timeout_s)
        except Refused:
            return False
        return True

    def close(self) -> None:
        """Nothing: nothing is held."""


def name_of(path: str) -> str:
    """The last part of a path; an id may hold anything but a slash."""
    return path.rsplit("/", 1)[1]
