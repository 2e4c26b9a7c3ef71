from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.lua.desk import Desk


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def desk(client: Any) -> Desk:
    return Desk(client)
