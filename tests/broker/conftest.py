from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.broker.counter import Counter


@pytest.fixture
def counter(redis_url: str) -> Iterator[Counter]:
    counter = Counter(redis_url)
    yield counter
    counter.close()
