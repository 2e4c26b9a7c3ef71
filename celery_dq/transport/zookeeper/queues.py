"""Declaring, counting, emptying and deleting queues; sweeping away what transient ones leave behind.

A *transient* queue goes with its users (``auto_delete``): replies to remote control, mailboxes of workers,
events. Its users have ephemeral nodes; what is without any for a while is swept away by whoever consumes.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from kazoo.exceptions import KazooException, NoAuthError, NodeExistsError, NoNodeError, NotEmptyError

from celery_dq.errors import ZooKeeperUnreachable
from celery_dq.znodes import BrokerNodes, QueueNodes
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import Refused, ask_all, delete, denied, transact

logger = logging.getLogger(__name__)

#: Seconds that an answer is waited for.
ANSWER_S = 10.0
#: Nodes that one transaction deletes.
CHUNK = 500


class Queues:
    """The queues of a broker, as one connection sees them.

    Arguments:
        session: opened when it is needed.
        nodes: of the broker.
    """

    def __init__(self, session: Session, nodes: BrokerNodes) -> None:
        self._session = session
        self._nodes = nodes
        self._guid = uuid.uuid4().hex
        self._known: set[str] = set()
        self._unused: set[str] = set()

    def nodes(self, queue: str) -> QueueNodes:
        """The nodes of the queue called *queue*."""
        return self._nodes.queue(queue)

    @property
    def session(self) -> Session:
        """The session that it asks in."""
        return self._session

    def _ask(self, request: Any) -> Any:
        try:
            return self._session.ask(request, ANSWER_S)
        except NoAuthError as error:
            raise denied("use", self._nodes.path, error) from None

    # -- one queue -----------------------------------------------------------------

    def declare(self, queue: str, transient: bool = False) -> None:
        """Make the folders of a queue; a transient one is used by this connection from now on."""
        if transient:
            user = f"{self._nodes.transient(queue)}/{self._guid}"
            with contextlib.suppress(NodeExistsError):  # declared before, by us
                self._ask(lambda client: client.create_async(user, b"", ephemeral=True, makepath=True))
        if queue not in self._known:
            # It is made last, so that where it is, the others are.
            if not self.exists(queue):
                self.restore(queue)
            self._known.add(queue)

    def restore(self, queue: str) -> None:
        """A folder turned out to be missing: make it again."""
        for folder in reversed(self.nodes(queue).folders):
            self._ask(lambda client, folder=folder: client.ensure_path_async(folder))

    def exists(self, queue: str) -> bool:
        """Whether the queue was declared, by anybody."""
        return self._ask(lambda client: client.exists_async(self.nodes(queue).ready)) is not None

    def size(self, queue: str) -> int:
        """How many messages wait: not those in somebody's hands, or before their time."""
        nodes = self.nodes(queue)
        ready, locks = self._counts([nodes.ready, nodes.locks])
        return max(ready - locks, 0)

    def loads(self, queues: Sequence[str]) -> list[int | None]:
        """How many messages are in each queue; None where it is gone."""
        answers = self._stats([self.nodes(queue).ready for queue in queues])
        return [None if answer is None else int(answer.numChildren) for answer in answers]

    def _counts(self, paths: Sequence[str]) -> list[int]:
        return [0 if stat is None else int(stat.numChildren) for stat in self._stats(paths)]

    def _stats(self, paths: Sequence[str]) -> list[Any]:
        answers = ask_all(
            self._session, lambda client: [client.exists_async(path) for path in paths], ANSWER_S
        )
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def purge(self, queue: str) -> int:
        """Remove what waits and what is delayed, not what is in somebody's hands; returns how many."""
        nodes = self.nodes(queue)
        locked = set(self.children(nodes.locks))
        waiting = [name for name in self.children(nodes.ready) if name not in locked]
        ready = [nodes.item(name) for name in waiting]
        delayed = [f"{nodes.delayed}/{name}" for name in self.children(nodes.delayed)]
        removed = self.remove([*ready, *delayed])
        suspects = {*self.children(nodes.suspects)} & {*waiting}
        self.remove([nodes.suspect(name) for name in suspects])
        return removed

    def delete(self, queue: str) -> None:
        """Remove the queue with all that is in it."""
        self._known.discard(queue)
        nodes = self.nodes(queue)
        for folder in (nodes.ready, nodes.delayed, nodes.unreadable, nodes.locks, nodes.suspects):
            self.remove([f"{folder}/{name}" for name in self.children(folder)])
            self._try_to_remove(folder)
        # Stays where there are dead letters: they are there until somebody says otherwise.
        for folder in (nodes.dead, nodes.path):
            self._try_to_remove(folder)

    def leave(self, queue: str) -> None:
        """This connection uses a transient queue no longer; who leaves last deletes it."""
        marker = self._nodes.transient(queue)
        self._try_to_remove(f"{marker}/{self._guid}")
        if not self.children(marker):
            self.delete(queue)
            self._try_to_remove(marker)

    def names(self) -> list[str]:
        """Of the queues that stay."""
        transient = set(self.children(self._nodes.transients))
        return sorted(
            BrokerNodes.queue_called(name)
            for name in self.children(self._nodes.queues)
            if name not in transient
        )

    def children(self, folder: str) -> list[str]:
        """The names in a folder; none where there is no folder."""
        try:
            names: list[str] = self._ask(lambda client: client.get_children_async(folder))
        except NoNodeError:
            return []
        return names

    def remove(self, paths: Sequence[str]) -> int:
        """Delete nodes; returns how many were there."""
        removed = 0
        for start in range(0, len(paths), CHUNK):
            chunk = paths[start : start + CHUNK]
            try:
                transact(self._session, [delete(path) for path in chunk], ANSWER_S)
                removed += len(chunk)
            except Refused:
                # One of them is gone already: each on its own.
                answers = ask_all(
                    self._session,
                    lambda client, chunk=chunk: [client.delete_async(path) for path in chunk],  # type: ignore[misc]  # of a default
                    ANSWER_S,
                )
                removed += sum(not isinstance(answer, Exception) for answer in answers)
        return removed

    def _try_to_remove(self, path: str) -> None:
        try:
            self._ask(lambda client: client.delete_async(path))
        except (NoNodeError, NotEmptyError) as error:
            logger.debug("%s is not removed: %r.", path, error)

    # -- sweeping ------------------------------------------------------------------

    def sweep(self) -> None:
        """Remove the transient queues that nobody has used since the last sweep."""
        try:
            unused = {name for name in self.children(self._nodes.transients) if not self._users(name)}
            for name in unused & self._unused:
                self._sweep_away(name)
            self._unused = unused
        except (ZooKeeperUnreachable, KazooException) as error:
            logger.info("Transient queues could not be swept: %r.", error)

    def _users(self, name: str) -> Iterable[str]:
        return self.children(f"{self._nodes.transients}/{name}")

    def _sweep_away(self, name: str) -> None:
        logger.info("The transient queue %s is removed: nobody uses it.", name)
        queue = BrokerNodes.queue_called(name)
        dead = self.nodes(queue).dead
        self.remove([f"{dead}/{letter}" for letter in self.children(dead)])
        self.delete(queue)
        self._try_to_remove(f"{self._nodes.transients}/{name}")
