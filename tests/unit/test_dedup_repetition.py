from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from celery_dq.dedup.repetition import RepetitionKind, repetition


def test_the_three_kinds() -> None:
    assert repetition("abcdefgh", 3).kind is RepetitionKind.NONE
    # The example of the document: r1 is repeated at distance 4, with three consumers.
    assert repetition("abcda", 3).kind is RepetitionKind.SPARSE
    assert repetition("aaaab", 3).kind is RepetitionKind.HIGH


def test_figures() -> None:
    found = repetition("abacbbd", 2)
    assert (found.calls, found.keys, found.repeated, found.close, found.covered) == (7, 4, 2, 2, 3)
    assert found.distances == {1: 1, 2: 1}
    assert found.saved == pytest.approx(3 / 7)
    assert "2 of 2 repeated keys" in found.advice
    assert "nothing to do" in repetition("", 1).advice


def test_consumers_must_be_a_number() -> None:
    with pytest.raises(ValueError, match="consumers = 0"):
        repetition("ab", 0)


def test_plot(tmp_path: Path) -> None:
    repetition("abacbbd", 2).plot(tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 1000


@given(st.lists(st.sampled_from("abcdef")), st.integers(1, 5))
def test_distances_are_minimal(keys: list[str], consumers: int) -> None:
    found = repetition(keys, consumers)
    slow = {
        key: min(
            j - i for i in range(len(keys)) for j in range(i + 1, len(keys)) if keys[i] == keys[j] == key
        )
        for key in set(keys)
        if keys.count(key) > 1
    }
    assert sum(found.distances.values()) == len(slow)
    assert found.close == sum(distance <= consumers for distance in slow.values())
