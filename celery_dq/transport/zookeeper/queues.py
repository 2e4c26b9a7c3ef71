"""Declaring, counting, emptying and deleting queues, their bindings, and the sweep of transient queues.

A *transient* queue (``auto_delete``) ends with its last user: replies to remote control, mailboxes of
workers, events. Each user has an ephemeral node. Every consuming process sweeps: it deletes transient queues
that have had no user for one sweep interval.

"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from typing import Any

from kazoo.exceptions import KazooException, NoAuthError, NodeExistsError, NoNodeError, NotEmptyError

from celery_dq.errors import ZooKeeperUnreachable
from celery_dq.shown import shown_logger
from celery_dq.transport.threaded_channel import Binding
from celery_dq.znodes import BrokerNodes, QueueNodes, binding_of
from celery_dq.zookeeper.session import Session, SessionState
from celery_dq.zookeeper.transaction import TransactionRefused, ask_all, delete, failure_of, transact

logger = shown_logger(__name__)

#: Seconds to wait for an answer.
ANSWER_S = 10.0
#: Maximum number of nodes that one transaction deletes.
CHUNK = 500
#: Seconds to wait for an answer about a binding.
BINDING_ANSWER_S = 5.0


class ZooKeeperQueues:
    """Operations of one connection on the queues of a broker.

    Args:
        session: Opened at the first request.
        nodes: The nodes of the broker.
    """

    def __init__(self, session: Session, nodes: BrokerNodes) -> None:
        self._session = session
        self._nodes = nodes
        self._guid = uuid.uuid4().hex
        self._known: set[str] = set()
        self._unused: set[str] = set()

    def nodes(self, queue: str) -> QueueNodes:
        """The nodes of the queue named *queue*."""
        return self._nodes.queue(queue)

    @property
    def session(self) -> Session:
        """The session that sends the requests."""
        return self._session

    def _ask(self, request: Any) -> Any:
        try:
            return self._session.ask(request, ANSWER_S)
        except NoAuthError as error:
            raise failure_of("use", self._nodes.path, error) from None

    # -- one queue -----------------------------------------------------------------

    def declare(self, queue: str, transient: bool = False) -> None:
        """Create the folders of a queue, and register this connection as a user of a transient one."""
        if transient:
            user = f"{self._nodes.transient(queue)}/{self._guid}"
            with contextlib.suppress(NodeExistsError):  # this connection has declared it before
                self._ask(lambda client: client.create_async(user, b"", ephemeral=True, makepath=True))
        if queue not in self._known:
            # `restore` creates this folder last: if it exists, so do the others.
            if not self.exists(queue):
                self.restore(queue)
            self._known.add(queue)

    def restore(self, queue: str) -> None:
        """Create the missing folders of a queue."""
        for folder in reversed(self.nodes(queue).folders):
            self._ask(lambda client, folder=folder: client.ensure_path_async(folder))

    def exists(self, queue: str) -> bool:
        """Whether any process has declared the queue."""
        return self._ask(lambda client: client.exists_async(self.nodes(queue).ready)) is not None

    def size(self, queue: str) -> int:
        """How many messages wait, without delayed messages and messages in flight."""
        nodes = self.nodes(queue)
        ready, locks = self._counts([nodes.ready, nodes.locks])
        return max(ready - locks, 0)

    def loads(self, queues: Sequence[str]) -> list[int | None]:
        """How many messages are in each queue; None for a queue that does not exist."""
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
        """Delete the waiting and the delayed messages, but none in flight; return how many were deleted."""
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
        """Delete the queue with its messages, except its dead letters."""
        self._known.discard(queue)
        nodes = self.nodes(queue)
        for folder in (nodes.ready, nodes.delayed, nodes.unreadable, nodes.locks, nodes.suspects):
            self.remove([f"{folder}/{name}" for name in self.children(folder)])
            self._try_to_remove(folder)
        # The folders stay if there are dead letters: only an explicit purge deletes those.
        for folder in (nodes.dead, nodes.path):
            self._try_to_remove(folder)

    def leave(self, queue: str) -> None:
        """End this connection's use of a transient queue; delete the queue if no user is left."""
        if self._session.state is not SessionState.CONNECTED:
            return  # the use ends with the session, and a sweep deletes the queue
        marker = self._nodes.transient(queue)
        self._try_to_remove(f"{marker}/{self._guid}")
        if not self.children(marker):
            self.delete(queue)
            self._try_to_remove(marker)

    def names(self) -> list[str]:
        """The names of the queues that are not transient."""
        transient = set(self.children(self._nodes.transients))
        return sorted(
            BrokerNodes.queue_called(name)
            for name in self.children(self._nodes.queues)
            if name not in transient
        )

    def children(self, folder: str) -> list[str]:
        """The names in a folder; an empty list if the folder does not exist."""
        try:
            names: list[str] = self._ask(lambda client: client.get_children_async(folder))
        except NoNodeError:
            return []
        return names

    def remove(self, paths: Sequence[str]) -> int:
        """Delete nodes; return how many existed."""
        removed = 0
        for start in range(0, len(paths), CHUNK):
            chunk = paths[start : start + CHUNK]
            try:
                transact(self._session, [delete(path) for path in chunk], ANSWER_S)
                removed += len(chunk)
            except TransactionRefused:
                # One of them does not exist: delete each with its own request.
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
            logger.debug("Node %s was not deleted: %r.", path, error)

    # -- sweeping ------------------------------------------------------------------

    def sweep(self) -> None:
        """Delete the transient queues that had no user at the last sweep and have none now."""
        try:
            transients = self._nodes.transients
            unused = {name for name in self.children(transients) if not self.children(f"{transients}/{name}")}
            for name in unused & self._unused:
                self._sweep_away(name)
            self._unused = unused
        except (ZooKeeperUnreachable, KazooException) as error:
            logger.info(
                "The sweep of transient queues failed; the next sweep tries again: %r.",
                error,
                extra={"event": "zookeeper_sweep_failed"},
            )

    def _sweep_away(self, name: str) -> None:
        logger.info(
            "Transient queue %s has no user; it is deleted.",
            name,
            extra={"event": "zookeeper_transient_queue_deleted"},
        )
        queue = BrokerNodes.queue_called(name)
        dead = self.nodes(queue).dead
        self.remove([f"{dead}/{letter}" for letter in self.children(dead)])
        self.delete(queue)
        self._try_to_remove(f"{self._nodes.transients}/{name}")


class Bindings:
    """The bindings of all exchanges, with the cache of one connection.

    Kombu's virtual transports keep binding tables per process, so that a reply finds only queues that its own
    process has declared. Here a binding is a node: ephemeral for a transient queue, otherwise persistent.
    Tables are cached until a watch on the exchange's folder fires, so that an event without a consumer costs
    no request.

    Args:
        session: Opened at the first request.
        nodes: The nodes of the broker.
    """

    def __init__(self, session: Session, nodes: BrokerNodes) -> None:
        self._session = session
        self._nodes = nodes
        self._guid = uuid.uuid4().hex
        self._tables: dict[str, list[Binding]] = {}
        self._session_id: int | None = None

    def bind(self, exchange: str, queue: str, routing_key: str, transient: bool) -> None:
        """Add a binding; the binding of a transient queue ends with this session."""
        node = self._nodes.binding(exchange, queue, routing_key, self._guid if transient else "")
        with contextlib.suppress(NodeExistsError):
            self._session.ask(
                lambda client: client.create_async(node, b"", ephemeral=transient, makepath=True),
                BINDING_ANSWER_S,
            )
        self._tables.pop(exchange, None)

    def unbind(self, exchange: str, queue: str, routing_key: str) -> None:
        """Remove a binding: the persistent one, and the ephemeral one of this connection."""
        for owner in (self._guid, ""):
            node = self._nodes.binding(exchange, queue, routing_key, owner)
            try:
                self._session.ask(lambda client, node=node: client.delete_async(node), BINDING_ANSWER_S)  # type: ignore[misc]  # of a default
            except NoNodeError:
                continue
        self._tables.pop(exchange, None)

    def table(self, exchange: str, fresh: bool = False) -> list[Binding]:
        """Return the bindings of an exchange.

        Args:
            exchange: Name of the exchange.
            fresh: Do not use the cache, and include every binding that any server of the ensemble has
                confirmed before this call.
        """
        if self._session_id != self._session.id:
            # The watches ended with their session.
            self._tables.clear()
            self._session_id = self._session.id
        known = self._tables.get(exchange)
        if known is not None and not fresh:
            return known
        folder = self._nodes.bindings(exchange)
        if fresh:
            self._session.ask(lambda client: client.sync_async(folder), BINDING_ANSWER_S)

        news: list[Any] = []

        def changed(event: Any) -> None:
            news.append(event)
            self._tables.pop(exchange, None)

        def ask() -> list[str]:
            names: list[str] = self._session.ask(
                lambda client: client.get_children_async(folder, watch=changed), BINDING_ANSWER_S
            )
            return names

        try:
            names = ask()
        except NoNodeError:
            self._session.ask(lambda client: client.ensure_path_async(folder), BINDING_ANSWER_S)
            names = ask()
        found = {binding for binding in map(_binding, names) if binding is not None}
        table = self._tables[exchange] = sorted(found)
        if news:
            # The watch fired before the table was cached.
            self._tables.pop(exchange, None)
        return table


def _binding(name: str) -> Binding | None:
    try:
        queue, routing_key, transient = binding_of(name)
    except ValueError:
        return None
    return Binding(routing_key, queue, transient)
