"""Ending a session, or only its connection, without the knowledge of its owner."""

from __future__ import annotations

import contextlib
import socket
import time

from kazoo.exceptions import KazooException

from celery_dq.testing.waiting import wait_until
from celery_dq.zookeeper.session import Session


def expire(session: Session, timeout_s: float = 60.0) -> None:
    """End a session with its id and password, and return when its owner has a new session."""
    client = session.open()
    before = session.id
    deadline = time.monotonic() + timeout_s
    while session.id == before:
        assert time.monotonic() < deadline, "the session does not end"
        other = type(client)(hosts=session.hosts, client_id=client.client_id)
        # The owner reconnects as soon as the session is taken over, and may be faster.
        with contextlib.suppress(KazooException, other.handler.timeout_exception):
            other.start()
            other.stop()
        other.close()
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: session.id != before, 2.0)
    session.open(timeout_s)


def break_connection(session: Session) -> None:
    """Break the connection of a session; the session lives on."""
    client = session.open()
    with contextlib.suppress(OSError):
        client._connection._socket.shutdown(socket.SHUT_RDWR)
