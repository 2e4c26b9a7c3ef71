"""The names and the format of nodes: samples of Curator 5.4 and 5.9, and properties of all names."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from celery_dq.curator.framing import frame, unframe
from celery_dq.curator.names import (
    DELAY,
    ID,
    PLAIN,
    PRIORITY,
    SIMPLE,
    delay_prefix,
    id_of,
    id_prefix,
    priority_prefix,
)
from celery_dq.curator.queue import due_ms
from celery_dq.errors import CorruptRecord, InvalidMessage, InvalidPriority

INT32 = st.integers(-(2**31), 2**31 - 1)


def sequence(number: int) -> str:
    return f"{number:010d}"


@pytest.mark.parametrize(
    ("priority", "written"),
    [(7, "queue-100000007"), (-7, "queue-0FFFFFFF9"), (0, "queue-100000000"), (-(2**31), "queue-080000000")],
)
def test_priorities_are_written_as_curator_does(priority: int, written: str) -> None:
    assert priority_prefix(priority) == written


def test_other_names_are_written_as_curator_does() -> None:
    assert delay_prefix(1700000000000) == "queue-|18BCFE56800|"
    assert id_prefix("mail 7") == "queue-|mail 7|"
    assert frame([b"hello"]) == bytes.fromhex("00010001 01 00000005 68656c6c6f 02")


@given(INT32, INT32, INT32)
def test_priorities_sort_as_numbers_and_names_as_curator_sorts_them(one: int, two: int, number: int) -> None:
    names = [priority_prefix(each) + sequence(number) for each in (one, two)]
    places = [PRIORITY.place(name) for name in names]
    assert places[0] is not None
    assert places[1] is not None
    assert (places[0] < places[1]) == (one < two) == (names[0] < names[1])
    assert places[0].sequence == number
    assert PRIORITY.prefix(names[0]) == priority_prefix(one)


@given(INT32)
def test_sequences_are_read_after_the_roll_over_too(number: int) -> None:
    for grammar, prefix in (
        (PLAIN, "queue-"),
        (ID, "queue-|a|-|"),
        (DELAY, "queue-|1F|"),
        (SIMPLE, "qn-"),
    ):
        place = grammar.place(prefix + sequence(number))
        assert place is not None
        assert place.sequence == number
        assert grammar.prefix(prefix + sequence(number)) == prefix


@given(st.text(min_size=1).filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text)))
def test_ids_of_any_characters_come_back(item_id: str) -> None:
    name = id_prefix(item_id) + "0000000001"
    assert id_of(name) == item_id
    assert "/" not in name
    assert name.count("|") == 2


def test_ids_without_special_characters_are_written_as_they_are() -> None:
    assert id_prefix("50% ü.-_x") == "queue-|50% ü.-_x|"
    assert id_prefix("%2F") != id_prefix("/")
    # A name that Curator itself wrote is not decoded.
    assert id_of("queue-|50% off|0000000007") == "50% off"
    assert id_of("queue-0000000007") is None


@pytest.mark.parametrize("item_id", ["", None, 7, "\ud800"])
def test_unusable_ids_are_refused(item_id: object) -> None:
    with pytest.raises(InvalidMessage, match="id = "):
        id_prefix(item_id)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["queue-", "queue-1", "queue-|x", "lock-0000000001", "queue-0000000001x", ""]
)
def test_strangers_are_reported_apart(name: str) -> None:
    assert [grammar.place(name) for grammar in (PLAIN, ID, DELAY, PRIORITY, SIMPLE)] == [None] * 5
    with pytest.raises(InvalidMessage):
        PLAIN.prefix(name)


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1, 1.0, "1", True, None])
def test_unusable_priorities_are_refused(priority: object) -> None:
    with pytest.raises(InvalidPriority, match="priority = "):
        priority_prefix(priority)  # type: ignore[arg-type]


@pytest.mark.parametrize("due", [-1, float("nan"), float("inf"), "1", None, True, 1e40])
def test_unusable_due_times_are_refused(due: object) -> None:
    with pytest.raises(InvalidMessage, match="due = "):
        delay_prefix(due_ms(due))  # type: ignore[arg-type]


@given(st.lists(st.binary()))
def test_items_are_framed_and_read_back(items: list[bytes]) -> None:
    assert unframe(frame(items)) == items


@given(st.lists(st.binary(), min_size=1), st.data())
def test_a_truncated_node_is_reported(items: list[bytes], data: st.DataObject) -> None:
    whole = frame(items)
    with pytest.raises(CorruptRecord):
        unframe(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(st.binary())
def test_any_other_bytes_are_reported_or_read(junk: bytes) -> None:
    try:
        items = unframe(junk)
    except CorruptRecord:
        return
    assert frame(items) == junk[: len(frame(items))]
