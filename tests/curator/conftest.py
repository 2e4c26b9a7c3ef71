from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_dq.zookeeper.session import Session


@pytest.fixture
def session(hosts: str) -> Iterator[Session]:
    """A session for looking at nodes and changing them; the queues under test have their own sessions."""
    session = Session(hosts, timeout_s=30)
    session.open()
    yield session
    session.close()


@pytest.fixture
def make(hosts: str) -> Iterator[Callable[..., Any]]:
    """Return a function that makes queues, each with its own session; all are closed after the test.

    The sessions are long, so that on a slow machine only those expire that a test ends.
    """
    made: list[tuple[Any, Session]] = []

    def build(kind: Callable[..., Any], path: str = "/queue", **options: Any) -> Any:
        session = Session(options.pop("hosts", hosts), timeout_s=30)
        queue = kind(session, path, **options)
        made.append((queue, session))
        return queue

    yield build
    for queue, session in made:
        queue.close()
        session.close()
