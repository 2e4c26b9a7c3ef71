"""Ending the session of a kombu connection behind its back."""

from __future__ import annotations

from kombu import Connection

from tests.curator.expiry import expire as expire_session
from tests.zookeeper_transport.kinds import transport_of


def expire(connection: Connection) -> None:
    """End the session of a connection; it has another one when this returns, and has lost what it held."""
    expire_session(transport_of(connection).session)
