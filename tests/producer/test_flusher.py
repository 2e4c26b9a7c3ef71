"""The lanes of a flusher, step by step: their turns, their linger, and what is logged about them."""

from __future__ import annotations

from pathlib import Path

from celery_dq.producer.buffer import BufferedMessage
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
