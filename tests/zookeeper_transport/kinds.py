"""Casts of kombu's types to the types of this broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from kombu import Connection

from celery_dq.transport.in_flight import StoredMessage
from celery_dq.transport.zookeeper.transport import Transport
from tests.conformance.kombu_queue import KombuQueue

#: Opens a connection to the broker of a test; see the fixture `connect`.
Connect = Callable[..., Connection]


def transport_of(connection: Connection) -> Transport:
    """The transport of a connection to ZooKeeper."""
    return cast("Transport", connection.transport)


def stored(room: KombuQueue) -> list[StoredMessage]:
    """Return the list of messages that a consumer has received; the list is not copied."""
    return cast("list[StoredMessage]", room.received)
