"""Elections of both kinds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.leadership.booth import Booth, redis_booth, zookeeper_booth


@pytest.fixture(params=[zookeeper_booth, redis_booth], ids=["zookeeper", "redis"])
def booth(request: pytest.FixtureRequest) -> Iterator[Booth]:
    made: Booth = request.param(request)
    yield made
    made.close()
