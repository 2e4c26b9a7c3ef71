from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_dq.zookeeper.session import Session


@pytest.fixture
def session(hosts: str) -> Iterator[Session]:
    """A session; its chroot has folders for items and locks."""
    session = Session(hosts, timeout_s=30)
    session.open().ensure_path("/items")
    session.open().ensure_path("/locks")
    yield session
    session.close()


@pytest.fixture
def client(session: Session) -> Any:
    return session.open()
