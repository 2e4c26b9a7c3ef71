"""Ending a session behind its owner's back."""

from __future__ import annotations

import contextlib
import time

from kazoo.exceptions import KazooException

from celery_dq.testing.waiting import wait_until
from celery_dq.zookeeper.session import Session


def expire(session: Session, timeout_s: float = 60.0) -> None:
    """End a session: whoever knows its id and password may. Returns when its owner has another one."""
    client = session.open()
    before = session.id
    deadline = time.monotonic() + timeout_s
    while session.id == before:
        assert time.monotonic() < deadline, "the session does not end"
        thief = type(client)(hosts=session.hosts, client_id=client.client_id)
        # The owner takes the session back as soon as it is taken away, and may be quicker.
        with contextlib.suppress(KazooException, thief.handler.timeout_exception):
            thief.start()
            thief.stop()
        thief.close()
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: session.id != before, 2.0)
    session.open(timeout_s)
