from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_dq.zookeeper.session import Session


@pytest.fixture
def session(hosts: str) -> Iterator[Session]:
    """A session to look and meddle with; the queues under test have their own."""
    session = Session(hosts, timeout_s=30)
    session.open()
    yield session
    session.close()


@pytest.fixture
def make(hosts: str) -> Iterator[Callable[..., Any]]:
    """Makes queues, each with a session of its own; closes them at the end.

    The sessions are long: on a slow machine, none expires but those that a test ends."""
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
