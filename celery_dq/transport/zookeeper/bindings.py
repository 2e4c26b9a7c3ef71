"""The bindings of exchanges, shared by all connections.

Kombu's virtual transports keep binding tables per process, so that a reply finds only queues that its own
process has declared. Here a binding is a node: ephemeral for a transient queue, otherwise persistent. Tables
are cached until a watch on the exchange's folder fires, so that an event without a consumer costs no request.
"""

from __future__ import annotations

import contextlib
import uuid
from typing import Any

from kazoo.exceptions import NodeExistsError, NoNodeError

from celery_dq.transport.threaded_channel import Binding
from celery_dq.znodes import BrokerNodes, binding_of
from celery_dq.zookeeper.session import Session

#: Seconds to wait for an answer.
ANSWER_S = 5.0


class Bindings:
    """The bindings of all exchanges, with the cache of one connection.

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
                lambda client: client.create_async(node, b"", ephemeral=transient, makepath=True), ANSWER_S
            )
        self._tables.pop(exchange, None)

    def unbind(self, exchange: str, queue: str, routing_key: str) -> None:
        """Remove a binding: the persistent one, and the ephemeral one of this connection."""
        for owner in (self._guid, ""):
            node = self._nodes.binding(exchange, queue, routing_key, owner)
            try:
                self._session.ask(lambda client, node=node: client.delete_async(node), ANSWER_S)  # type: ignore[misc]  # of a default
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
            self._session.ask(lambda client: client.sync_async(folder), ANSWER_S)

        news: list[Any] = []

        def changed(event: Any) -> None:
            news.append(event)
            self._tables.pop(exchange, None)

        def ask() -> list[str]:
            names: list[str] = self._session.ask(
                lambda client: client.get_children_async(folder, watch=changed), ANSWER_S
            )
            return names

        try:
            names = ask()
        except NoNodeError:
            self._session.ask(lambda client: client.ensure_path_async(folder), ANSWER_S)
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
