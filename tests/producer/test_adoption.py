"""Whoever adopts what a dead process left, nobody else does."""

from __future__ import annotations

import threading
from pathlib import Path

from celery_dq.producer.spill_log import Orphan, SpillLog
from tests.producer.test_spill_log import PRODUCER, WRITER, Child, log_of


def test_what_was_adopted_is_not_let_go_by_looking_again(tmp_path: Path) -> None:
    writer = Child(WRITER, tmp_path, 3)
    writer.line()
    writer.kill()
    # Two apps of one process: a lock keeps the one from the other's no more than from its own.
    log, second = SpillLog(tmp_path), SpillLog(tmp_path)
    (orphan,) = log.orphans()
    # A process that has it looks for others every few seconds, for as long as the broker is away.
    assert list(log.orphans()) == list(second.orphans()) == []
    other = "import sys\nfrom pathlib import Path\nfrom celery_dq.producer.spill_log import SpillLog\n"
    other += "print(len(list(SpillLog(Path(sys.argv[1])).orphans())))"
    found = Child(other, tmp_path)
    assert found.line() == "0"
    found.kill()
    orphan.close()
    (again,) = second.orphans()
    assert list(log.orphans()) == []
    again.close()


def test_of_threads_that_meet_at_an_orphan_one_has_it(tmp_path: Path) -> None:
    for _ in range(20):
        writer = log_of(tmp_path, "dead")
        writer.create(PRODUCER, "lane").append(0, 0, b"x")
        writer._drop_lock()
        start = threading.Barrier(4)
        found: list[Orphan] = []

        def adopt(start: threading.Barrier = start, found: list[Orphan] = found) -> None:
            log = SpillLog(tmp_path)
            start.wait(30)
            found.extend(log.orphans())

        threads = [threading.Thread(target=adopt) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (orphan,) = found
        for segment in orphan.segments():
            segment.unlink()
        orphan.close()
    assert SpillLog(tmp_path).owners() == []
