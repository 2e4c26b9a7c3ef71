"""The model against all that keeps dedup keys; ``python -m tests.dedup.model`` is the long version."""

from __future__ import annotations

import pytest

from tests.dedup.model.stories import tell


@pytest.mark.parametrize(("kind", "examples"), [("local", 60), ("redis", 40), ("broker", 30)])
def test_every_promise_is_kept(kind: str, examples: int, redis_url: str) -> None:
    assert tell(kind, redis_url, examples=examples) >= examples
