"""Elections of both kinds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.leadership.booth import Booth, redis_booth, zookeeper_booth
from tests.leadership.hall import Hall


@pytest.fixture(params=[zookeeper_booth, redis_booth], ids=["zookeeper", "redis"])
def booth(request: pytest.FixtureRequest) -> Iterator[Booth]:
    made: Booth = request.param(request)
    yield made
    made.close()


@pytest.fixture
def hall(booth: Booth) -> Iterator[Hall]:
    made = Hall(booth)
    yield made
    booth.heal()
    for timeout_s in (0, 30):
        for runner in made.runners:
            runner.close(timeout_s)
