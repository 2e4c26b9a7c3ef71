"""The lanes of a flusher, step by step: their turns, their linger, and what is logged about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from celery_dq.producer.buffer import BufferedMessage
from celery_dq.producer.flusher import LAST_DELAY_S
from celery_dq.producer.sender import PublishDeferred, Refusal
from tests.producer.producer_harness import Bench
from tests.producer.test_spill_log import log_of


def test_a_flush_lets_no_message_of_its_process_linger_behind_those_of_a_dead_one(
    bench: Bench, tmp_path: Path
) -> None:
    dead = log_of(tmp_path, "dead")
    segment = dead.create(b"p" * 16, "a")
    for number in range(1, 31):
        segment.append(BufferedMessage(number, b"", b"%d" % number))
    dead._drop_lock()
    bench.put(0)
    bench.flusher.flush_soon()
    while bench.flusher.step():
        pass
    assert bench.got == [*range(1, 31), 0]
    bench.put(31)  # after the flush
    assert not bench.flusher.step()


def test_lanes_that_fail_slowly_leave_half_of_the_time_to_the_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Counter[str]()
    dead = [f"dead-{number}" for number in range(10)]

    def slow(lane: str, *rest: Any) -> Sequence[Refusal]:
        tried[lane] += 1
        bench.clock.advance(0.5 if lane == "a" else 3.0)
        if lane != "a":
            raise PublishDeferred("its master does not answer")
        return ()

    monkeypatch.setattr(bench.shelf, "send", slow)
    for lane in dead:
        bench.message_store.put(lane, b"", b"0")
    until = bench.clock.monotonic() + 300
    while bench.clock.monotonic() < until:
        for number in range(10):  # a full batch
            bench.put(number)
        assert bench.flusher.step()
    assert 0.5 * tried["a"] > 0.4 * 300
    assert min(tried[lane] for lane in dead) > 1


def test_a_lane_that_waits_and_an_outage_are_logged_once_each(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    send, accepted = bench.shelf.send, 0

    def full(lane: str, process: str, messages: Sequence[BufferedMessage]) -> Sequence[Refusal]:
        if lane == "full" and not bench.shelf.down:
            send(lane, process, messages[:accepted])
            raise PublishDeferred("the queue is full", sent=accepted)
        return send(lane, process, messages)

    def some_rounds() -> list[str]:
        caplog.clear()
        for _ in range(5):
            bench.message_store.put("a", b"", b"0")
            bench.message_store.put("full", b"", b"0")
            bench.clock.advance(LAST_DELAY_S * 2)
            while bench.flusher.step():
                pass
        return [each.__dict__["event"] for each in caplog.records if "event" in each.__dict__]

    monkeypatch.setattr(bench.shelf, "send", full)
    assert some_rounds() == ["buffer_lane_deferred"]
    bench.shelf.down = True
    assert some_rounds() == ["buffer_broker_unreachable"]
    bench.shelf.down = False
    assert some_rounds() == ["buffer_delivery_resumed"]
    accepted = 1
    assert some_rounds() == []
    monkeypatch.setattr(bench.shelf, "send", send)
    assert some_rounds() == []
    monkeypatch.setattr(bench.shelf, "send", full)
    assert some_rounds() == ["buffer_lane_deferred"]
