"""A stored record keeps what the layout says, and a moved one asks for its dedup lock again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_dq.transport.message_record import DedupSection, MessageRecord, as_accepted, as_moved

PLAIN = MessageRecord("a", "shop.notify", 3, 0, 5, b"{}", b"[]")
SECTION = DedupSection("key", 7, replace=True, awaited=True, continues=("run", 9))


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.parametrize("body", [b"\xff", "Grüße"])
def test_a_record_has_its_marks_after_packing(counted: bool, accepted: bool, body: str | bytes) -> None:
    record = PLAIN._replace(due_us=1, body=body, counted=counted, accepted=accepted, dedup=SECTION.pack())
    assert MessageRecord.unpack(record.pack()) == record


def test_a_record_that_was_accepted_differs_by_its_mark_only() -> None:
    assert as_accepted(PLAIN.pack()) == as_accepted(as_accepted(PLAIN.pack()))
    assert MessageRecord.unpack(as_accepted(PLAIN.pack())) == PLAIN._replace(accepted=True)


@pytest.mark.parametrize("awaited", [False, True])
def test_a_moved_record_asks_for_its_lock_again(awaited: bool) -> None:
    section = replace(SECTION, awaited=awaited)
    moved = MessageRecord.unpack(as_moved(PLAIN._replace(dedup=section.pack()).pack()))
    assert moved.accepted
    assert DedupSection.unpack(moved.dedup) == replace(section, follow=awaited, continues=("", 0))
    assert MessageRecord.unpack(as_moved(PLAIN.pack())) == PLAIN._replace(accepted=True)


def test_bytes_of_another_program_stay_as_they_are() -> None:
    assert as_moved(b"foreign") == b"foreign"
