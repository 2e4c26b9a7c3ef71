"""Ending the session of a kombu connection behind its back."""

from __future__ import annotations

from kombu import Connection


def expire(connection: Connection) -> None:
    """End the session of a connection: whoever knows id and password may close it."""
    client = connection.transport.session.open()
    thief = type(client)(hosts=connection.transport.session.hosts, client_id=client.client_id)
    thief.start()
    thief.stop()
    thief.close()
