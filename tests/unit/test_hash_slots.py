"""The slots of keys, by the examples of the specification of Redis Cluster."""

from __future__ import annotations

import binascii

import pytest

from celery_dq.hash_slots import SLOTS, place_of, slot_of


def hashed(text: str) -> int:
    return binascii.crc_hqx(text.encode(), 0) % SLOTS


@pytest.mark.parametrize(
    ("key", "tag"),
    [
        ("123456789", "123456789"),
        ("{user1000}.following", "user1000"),
        ("foo{bar}{zap}", "bar"),
        ("foo{}{bar}", "foo{}{bar}"),
        ("foo{{bar}}zap", "{bar"),
        ("foo{bar", "foo{bar"),
        ("foo}bar{", "foo}bar{"),
    ],
)
def test_a_key_with_a_tag_has_the_slot_of_the_tag(key: str, tag: str) -> None:
    assert slot_of(key) == slot_of(key.encode()) == hashed(tag)


def test_a_slot_is_that_of_the_specification() -> None:
    assert slot_of("123456789") == 0x31C3 % SLOTS


@pytest.mark.parametrize("number", [2, 3, 8, 100])
def test_partitions_are_spread_over_the_slots(number: int) -> None:
    slots = sorted(
        slot_of(f"{{online/push/{each}.{place_of('online', 'push', each)}}}") for each in range(number)
    )
    gaps = [after - before for before, after in zip(slots, [*slots[1:], slots[0] + SLOTS], strict=True)]
    # By the golden ratio, neighbours differ by a factor below three; beside it, each slot is a little off.
    assert min(gaps) > SLOTS / number / 3 - 140
    assert max(gaps) < SLOTS / number * 2 + 140
