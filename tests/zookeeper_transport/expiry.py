"""Ending the session of a kombu connection without its knowledge."""

from __future__ import annotations

from kombu import Connection

from tests.curator.expiry import expire as expire_session
from tests.zookeeper_transport.kinds import transport_of


def expire(connection: Connection) -> None:
    """End the session of a connection, and return when it has a new session and has lost its locks."""
    expire_session(transport_of(connection).session)
