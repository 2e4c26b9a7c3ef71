"""Tasks on a running worker, in every pool: calls, canvas, retries, delays, priorities."""

from __future__ import annotations

import datetime
import time
from uuid import uuid4

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError

from celery_dq.testing.waiting import wait_until
from tests.conformance.workplace import Workplace

WAIT = 30


def test_delay_and_get(staffed: Workplace) -> None:
    assert staffed.send("add", 2, 3).get(timeout=WAIT) == 5


def test_a_hundred_calls(staffed: Workplace) -> None:
    results = [staffed.send("add", number, 1) for number in range(100)]
    assert [result.get(timeout=WAIT) for result in results] == list(range(1, 101))


def test_send_task_by_name(staffed: Workplace) -> None:
    assert staffed.app.send_task("add", (4, 5), queue=staffed.queue).get(timeout=WAIT) == 9


def test_a_failure_travels_back(staffed: Workplace) -> None:
    with pytest.raises(ValueError, match="on purpose"):
        staffed.send("fail").get(timeout=WAIT)


def test_ignore_result(staffed: Workplace) -> None:
    subject = uuid4().hex
    result = staffed.send("tell_ignored", subject)
    staffed.witness.wait(subject)
    assert staffed.app.AsyncResult(result.id).state == "PENDING"


def test_retry_keeps_the_task_id(staffed: Workplace) -> None:
    key = uuid4().hex
    result = staffed.send("retry", key)
    assert result.get(timeout=WAIT) == 2
    assert staffed.witness.told(f"attempt:{key}") == [result.id] * 3


def test_retry_with_a_countdown(staffed: Workplace) -> None:
    assert staffed.send("retry", uuid4().hex, 1, 0.3).get(timeout=WAIT) == 1


def test_autoretry_gives_up(staffed: Workplace) -> None:
    key = uuid4().hex
    with pytest.raises(KeyError):
        staffed.send("autoretry", key).get(timeout=WAIT)
    assert len(staffed.witness.told(f"attempt:{key}")) == 3


def test_countdown_is_not_early(staffed: Workplace) -> None:
    subject = uuid4().hex
    started = time.time()
    staffed.send("tell", subject, countdown=1)
    staffed.witness.wait(subject)
    assert time.time() - started >= 1


def test_eta_with_a_time_zone(staffed: Workplace) -> None:
    subject = uuid4().hex
    zone = datetime.timezone(datetime.timedelta(hours=8))
    due = datetime.datetime.now(zone) + datetime.timedelta(seconds=0.8)
    staffed.send("tell", subject, eta=due)
    staffed.witness.wait(subject)
    assert datetime.datetime.now(zone) >= due


def test_a_delayed_task_does_not_hold_up_others(staffed: Workplace) -> None:
    for _ in range(20):
        staffed.send("add", 1, 1, countdown=60, expires=61, ignore_result=True)
    assert staffed.send("add", 1, 2).get(timeout=WAIT) == 3
    # Where the broker keeps them, they would be counted as waiting from here on.
    staffed.purge()


@pytest.mark.parametrize("expires", [-1, datetime.datetime(2001, 1, 1, tzinfo=datetime.timezone.utc)])
def test_an_expired_task_does_not_run(staffed: Workplace, expires: object) -> None:
    subject = uuid4().hex
    result = staffed.send("tell", subject, expires=expires)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=WAIT)
    assert staffed.witness.told(subject) == []


def test_a_task_that_expires_later_runs(staffed: Workplace) -> None:
    assert staffed.send("add", 1, 1, expires=60).get(timeout=WAIT) == 2


def test_chain(staffed: Workplace) -> None:
    tasks = [staffed.signature("add", 1, 1), staffed.signature("add", 10), staffed.signature("add", 100)]
    assert chain(*tasks).apply_async().get(timeout=WAIT) == 112


def test_group(staffed: Workplace) -> None:
    result = group(staffed.signature("add", number, number) for number in range(10)).apply_async()
    assert result.get(timeout=WAIT) == [number * 2 for number in range(10)]


def test_chord(staffed: Workplace) -> None:
    header = [staffed.signature("add", number, 0) for number in range(10)]
    assert chord(header)(staffed.signature("total")).get(timeout=WAIT) == 45


def test_a_chord_in_a_chain(staffed: Workplace) -> None:
    header = group(staffed.signature("add", number) for number in range(3))
    canvas = chain(staffed.signature("add", 1, 1), header, staffed.signature("total"))
    assert canvas.apply_async().get(timeout=WAIT) == 9


def test_a_chord_whose_member_fails(staffed: Workplace) -> None:
    header = [staffed.signature("add", 1, 1), staffed.signature("fail", "member")]
    # get() raises the member's own error when it sees the header first, a ChordError otherwise.
    with pytest.raises((ChordError, ValueError), match="member"):
        chord(header)(staffed.signature("total")).get(timeout=WAIT)


def test_link_and_link_error(staffed: Workplace) -> None:
    linked, errored = uuid4().hex, uuid4().hex
    staffed.send("add", 1, 1, link=staffed.signature("tell", linked, immutable=True))
    staffed.send("fail", link_error=staffed.signature("tell", errored, immutable=True))
    staffed.witness.wait(linked)
    staffed.witness.wait(errored)


def test_replace(staffed: Workplace) -> None:
    assert staffed.send("swap", 5).get(timeout=WAIT) == 6


@pytest.mark.parametrize("requeue", [True, False])
def test_reject(staffed: Workplace, requeue: bool) -> None:
    key = uuid4().hex
    result = staffed.send("reject", key, requeue)
    if requeue:
        assert result.get(timeout=WAIT) == "second time"
    else:
        staffed.witness.wait(f"attempt:{key}")
        # The message is gone, and the worker goes on.
        assert staffed.send("add", 1, 1).get(timeout=WAIT) == 2
        assert staffed.witness.told(f"attempt:{key}") == []


def test_acks_late(staffed: Workplace) -> None:
    key = uuid4().hex
    result = staffed.send("hold_late", key)
    staffed.witness.wait(f"started:{key}")
    staffed.witness.release(key)
    assert result.get(timeout=WAIT) == key
    assert staffed.witness.wait(f"finished:{key}") == result.id


def test_custom_headers_and_priority_reach_the_task(staffed: Workplace) -> None:
    result = staffed.send("headers", headers={"custom": "välue"}, priority=5)
    assert result.get(timeout=WAIT) == {"priority": 5, "custom": "välue"}


@pytest.mark.parametrize("pool", ["solo"], indirect=True)
def test_an_urgent_task_overtakes(staffed: Workplace, pool: str) -> None:
    key, subject = uuid4().hex, uuid4().hex
    broker = staffed.broker
    # Given a worker that is busy, and has fetched ahead at most one
    staffed.send("hold", key)
    staffed.witness.wait(f"started:{key}")
    for _ in range(5):
        staffed.send("tell", subject, "low", priority=broker.least_urgent)
    staffed.send("tell", subject, "high", priority=broker.most_urgent)
    staffed.witness.release(key)
    wait_until(lambda: len(staffed.witness.told(subject)) == 6, WAIT)
    assert staffed.witness.told(subject).index("high") <= 1


def test_nothing_is_left_in_hand(staffed: Workplace) -> None:
    assert staffed.send("add", 1, 1).get(timeout=WAIT) == 2
    wait_until(lambda: staffed.ask("active") == [], WAIT)
    wait_until(lambda: staffed.waiting() == 0, WAIT)
