"""The model against all implementations of dedup; ``python -m tests.dedup.model`` is the long version."""

from __future__ import annotations

import pytest

from tests.dedup.model.mutations import MUTATIONS, misfits
from tests.dedup.model.stories import run_stories


@pytest.mark.parametrize(("kind", "examples"), [("local", 60), ("redis", 40), ("broker", 30)])
def test_every_promise_is_kept(kind: str, examples: int, redis_url: str) -> None:
    assert run_stories(kind, redis_url, examples=examples) >= examples


def test_every_mutation_breaks_a_rule() -> None:
    # ``python -m tests.dedup.model.mutations`` shows that the model finds them.
    assert misfits(MUTATIONS) == []


def test_a_mutation_of_a_text_that_is_gone_is_named() -> None:
    gone = MUTATIONS[0]._replace(old="no such line")
    ambiguous = MUTATIONS[0]._replace(old="self")
    assert [gone.file in each for each in misfits([gone, MUTATIONS[0], ambiguous])] == [True, True]
