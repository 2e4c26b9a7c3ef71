from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.lua.partition_scripts import PartitionScripts


@pytest.fixture
def client(quiet_redis_url: str) -> Iterator[Any]:
    # A script whose answer is late is waited for: sent again, it would do its work twice.
    with redis.Redis.from_url(quiet_redis_url, socket_timeout=None) as client:
        yield client


@pytest.fixture
def scripts(client: Any) -> PartitionScripts:
    return PartitionScripts(client)
