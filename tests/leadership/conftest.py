"""Elections of both kinds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.leadership.election_harness import ElectionHarness, redis_elections, zookeeper_elections
from tests.leadership.recorded_careers import RecordedCareers


@pytest.fixture(params=[zookeeper_elections, redis_elections], ids=["zookeeper", "redis"])
def elections(request: pytest.FixtureRequest) -> Iterator[ElectionHarness]:
    made: ElectionHarness = request.param(request)
    yield made
    made.close()


@pytest.fixture
def careers(elections: ElectionHarness) -> Iterator[RecordedCareers]:
    made = RecordedCareers(elections)
    yield made
    elections.heal()
    for timeout_s in (0, 30):
        for runner in made.runners:
            runner.close(timeout_s)
