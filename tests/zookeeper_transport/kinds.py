"""What kombu's types do not say: of which kind its objects are with this broker."""

from __future__ import annotations

from typing import cast

from kombu import Connection

from celery_dq.transport.stored_message import StoredMessage
from celery_dq.transport.zookeeper.transport import Transport
from tests.conformance.mailroom import Mailroom


def transport_of(connection: Connection) -> Transport:
    """The transport of a connection to ZooKeeper."""
    return cast("Transport", connection.transport)


def stored(room: Mailroom) -> list[StoredMessage]:
    """What a consumer has received; the same list."""
    return cast("list[StoredMessage]", room.received)
