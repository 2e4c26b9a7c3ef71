"""The texts that the watch over process logs counts as faults."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.log_watch import LogWatch, faults, unexpected

OURS = """\
[ERROR] Heartbeat
Traceback (most recent call last):
  File "/src/celery_dq/transport/redis/in_flight/heartbeat.py", line 3, in run
    renew()
KeyError: 'a'
"""
OF_A_TASK = OURS.replace("celery_dq/transport/redis/in_flight/heartbeat.py", "shop/tasks.py")
CHAINED = OF_A_TASK + "\nDuring handling of the above exception, another exception occurred:\n\n" + OURS[18:]
DEAD_CHILD = (
    "Task handler raised error\n"
    + OURS[18:]
    + "\nDuring handling of the above exception, another exception occurred:\n\n"
    + OF_A_TASK[18:].replace(
        "KeyError: 'a'", "billiard.exceptions.WorkerLostError: Worker exited prematurely"
    )
)
NO_ACK = OURS.replace("Heartbeat", "Couldn't ack '1', reason:network:ConnectionError")
LOST = OURS.replace("[ERROR] Heartbeat", "consumer: Connection to broker lost. Trying to re-establish")


@pytest.mark.parametrize(
    ("log", "count"),
    [
        ("[INFO] all is well\n", 0),
        (OURS, 1),
        (OURS + "[INFO] next\n" + OURS, 2),
        (OF_A_TASK, 0),
        (CHAINED, 1),
        (DEAD_CHILD, 0),
        (LOST, 0),
        (NO_ACK, 0),
        (NO_ACK.replace("Connection", "Key"), 1),
        (OURS.replace("celery_dq/", "celery_dq/testing/"), 0),
        ("[ERROR] Pool callback raised exception: TypeError()\n", 1),
    ],
    ids=[
        "quiet",
        "ours",
        "two",
        "task",
        "chained",
        "dead child",
        "lost connection",
        "no ack",
        "ack",
        "test servers",
        "text",
    ],
)
def test_the_faults_of_a_log(log: str, count: int) -> None:
    found, held = faults(log)
    assert len(found) == count
    assert held == ""


def test_a_traceback_that_is_read_in_two_parts_is_one_fault(tmp_path: Path) -> None:
    for cut in range(1, len(CHAINED)):
        log, watch = tmp_path / f"{cut}.log", LogWatch()
        watch.watch(log)
        log.write_text(CHAINED[:cut])
        first = watch.collect()
        log.write_text(CHAINED)
        watch.drop(log)
        assert len(first + watch.collect()) == 1, cut


def test_a_record_of_the_test_process_counts_if_it_has_an_exception() -> None:
    watch, logger = LogWatch(), logging.getLogger("celery_dq.test_log_watch")
    logger.addHandler(watch)
    logger.propagate = False
    try:
        logger.error("without an exception")
        raise KeyError("a")
    except KeyError:
        logger.exception("with one")
    finally:
        logger.removeHandler(watch)
    (only,) = watch.collect()
    assert "with one" in only
    assert watch.collect() == []


def test_a_test_names_the_lines_that_it_expects() -> None:
    assert unexpected(["w1: refused", "w2: broken"], ["refused"]) == ["w2: broken"]
