"""Tasks on a running worker, in every pool: calls, canvas, retries, delays, priorities."""

from __future__ import annotations

import datetime
import time
from uuid import uuid4

import pytest
import redis
from celery import chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.conformance.celery_app import CeleryApp
from tests.conformance.shop import BROKER_DB
from tests.hostile_messages import BROADCASTS, publish_kinds, some_kinds

WAIT = 30


def test_delay_and_get(staffed_app: CeleryApp) -> None:
    assert staffed_app.send("add", 2, 3).get(timeout=WAIT) == 5


def test_many_calls(staffed_app: CeleryApp) -> None:
    calls = range(100 if staffed_app.broker.has_leases else 20)  # with eventlet, stock serves five a second
    results = [staffed_app.send("add", number, 1) for number in calls]
    assert [result.get(timeout=WAIT) for result in results] == [number + 1 for number in calls]


def test_send_task_by_name(staffed_app: CeleryApp) -> None:
    assert staffed_app.app.send_task("add", (4, 5), queue=staffed_app.queue).get(timeout=WAIT) == 9


def test_a_failure_travels_back(staffed_app: CeleryApp) -> None:
    with pytest.raises(ValueError, match="on purpose"):
        staffed_app.send("fail").get(timeout=WAIT)


def test_ignore_result(staffed_app: CeleryApp) -> None:
    subject = uuid4().hex
    result = staffed_app.send("report_ignored", subject)
    staffed_app.witness.wait(subject)
    assert staffed_app.app.AsyncResult(result.id).state == "PENDING"


def test_retry_keeps_the_task_id(staffed_app: CeleryApp) -> None:
    key = uuid4().hex
    result = staffed_app.send("retry", key)
    assert result.get(timeout=WAIT) == 2
    assert staffed_app.witness.reports(f"attempt:{key}") == [result.id] * 3


def test_retry_with_a_countdown(staffed_app: CeleryApp) -> None:
    assert staffed_app.send("retry", uuid4().hex, 1, 0.3).get(timeout=WAIT) == 1


@pytest.mark.parametrize("task", ["throttled", "throttled_late"])
def test_a_throttled_task_runs_again_later_and_no_retry_is_counted(staffed_app: CeleryApp, task: str) -> None:
    key = uuid4().hex
    assert staffed_app.send(task, key).get(timeout=WAIT) == 3
    reports = [each.split() for each in staffed_app.witness.reports(f"attempt:{key}")]
    assert [retries for retries, _ in reports] == ["0"] * 3
    first, second, third = (float(at) for _, at in reports)
    assert min(second - first, third - second) >= 0.19  # a countdown has whole milliseconds


def test_autoretry_gives_up(staffed_app: CeleryApp) -> None:
    key = uuid4().hex
    with pytest.raises(KeyError):
        staffed_app.send("autoretry", key).get(timeout=WAIT)
    assert len(staffed_app.witness.reports(f"attempt:{key}")) == 3


def test_countdown_is_not_early(staffed_app: CeleryApp) -> None:
    subject = uuid4().hex
    started = time.time()
    staffed_app.send("report", subject, countdown=1)
    staffed_app.witness.wait(subject)
    assert time.time() - started >= 1


def test_eta_with_a_time_zone(staffed_app: CeleryApp) -> None:
    subject = uuid4().hex
    zone = datetime.timezone(datetime.timedelta(hours=8))
    due = datetime.datetime.now(zone) + datetime.timedelta(seconds=0.8)
    staffed_app.send("report", subject, eta=due)
    staffed_app.witness.wait(subject)
    assert datetime.datetime.now(zone) >= due


def test_a_delayed_task_knows_its_eta(staffed_app: CeleryApp) -> None:
    due = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=0.5)
    seen = staffed_app.send("own_eta", eta=due).get(timeout=WAIT)
    assert datetime.datetime.fromisoformat(seen) == due
    assert staffed_app.send("own_eta").get(timeout=WAIT) is None


def test_a_delayed_task_does_not_hold_up_others(staffed_app: CeleryApp) -> None:
    for _ in range(20):
        staffed_app.send("add", 1, 1, countdown=60, expires=61, ignore_result=True)
    assert staffed_app.send("add", 1, 2).get(timeout=WAIT) == 3
    # A broker that keeps delayed tasks would count these as waiting in later tests.
    staffed_app.purge()


@pytest.mark.parametrize("expires", [-1, datetime.datetime(2001, 1, 1, tzinfo=datetime.timezone.utc)])
def test_an_expired_task_does_not_run(staffed_app: CeleryApp, expires: object) -> None:
    subject = uuid4().hex
    result = staffed_app.send("report", subject, expires=expires)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=WAIT)
    assert staffed_app.witness.reports(subject) == []


def test_a_task_that_expires_later_runs(staffed_app: CeleryApp) -> None:
    assert staffed_app.send("add", 1, 1, expires=60).get(timeout=WAIT) == 2


def test_chain(staffed_app: CeleryApp) -> None:
    tasks = [
        staffed_app.signature("add", 1, 1),
        staffed_app.signature("add", 10),
        staffed_app.signature("add", 100),
    ]
    assert chain(*tasks).apply_async().get(timeout=WAIT) == 112


def test_group(staffed_app: CeleryApp) -> None:
    result = group(staffed_app.signature("add", number, number) for number in range(10)).apply_async()
    assert result.get(timeout=WAIT) == [number * 2 for number in range(10)]


def test_chord(staffed_app: CeleryApp) -> None:
    header = [staffed_app.signature("add", number, 0) for number in range(10)]
    assert chord(header)(staffed_app.signature("total")).get(timeout=WAIT) == 45


def test_a_chord_in_a_chain(staffed_app: CeleryApp) -> None:
    header = group(staffed_app.signature("add", number) for number in range(3))
    canvas = chain(staffed_app.signature("add", 1, 1), header, staffed_app.signature("total"))
    assert canvas.apply_async().get(timeout=WAIT) == 9


def test_a_chord_whose_member_fails(staffed_app: CeleryApp) -> None:
    header = [staffed_app.signature("add", 1, 1), staffed_app.signature("fail", "member")]
    # get() raises the member's own error when it reads the header first, a ChordError otherwise.
    with pytest.raises((ChordError, ValueError), match="member"):
        chord(header)(staffed_app.signature("total")).get(timeout=WAIT)


def test_link_and_link_error(staffed_app: CeleryApp) -> None:
    linked, errored = uuid4().hex, uuid4().hex
    staffed_app.send("add", 1, 1, link=staffed_app.signature("report", linked, immutable=True))
    staffed_app.send("fail", link_error=staffed_app.signature("report", errored, immutable=True))
    staffed_app.witness.wait(linked)
    staffed_app.witness.wait(errored)


def test_replace(staffed_app: CeleryApp) -> None:
    assert staffed_app.send("swap", 5).get(timeout=WAIT) == 6


@pytest.mark.parametrize("requeue", [True, False])
def test_reject(staffed_app: CeleryApp, requeue: bool) -> None:
    key = uuid4().hex
    result = staffed_app.send("reject", key, requeue)
    if requeue:
        assert result.get(timeout=WAIT) == "second time"
    else:
        staffed_app.witness.wait(f"attempt:{key}")
        # The message is gone, and the worker continues.
        assert staffed_app.send("add", 1, 1).get(timeout=WAIT) == 2
        assert staffed_app.witness.reports(f"attempt:{key}") == []


def test_acks_late(staffed_app: CeleryApp) -> None:
    key = uuid4().hex
    result = staffed_app.send("hold_late", key)
    staffed_app.witness.wait(f"started:{key}")
    staffed_app.witness.release(key)
    assert result.get(timeout=WAIT) == key
    assert staffed_app.witness.wait(f"finished:{key}") == result.id


def test_custom_headers_and_priority_reach_the_task(staffed_app: CeleryApp) -> None:
    result = staffed_app.send("headers", headers={"custom": "välue"}, priority=5)
    assert result.get(timeout=WAIT) == {"priority": 5, "custom": "välue"}


@pytest.mark.parametrize("pool", ["solo"], indirect=True)
def test_an_urgent_task_overtakes(staffed_app: CeleryApp, pool: str) -> None:
    key, subject = uuid4().hex, uuid4().hex
    broker = staffed_app.broker
    # Given a worker that is busy, and has prefetched at most one message
    staffed_app.send("hold", key)
    staffed_app.witness.wait(f"started:{key}")
    for _ in range(5):
        staffed_app.send("report", subject, "low", priority=broker.least_urgent)
    staffed_app.send("report", subject, "high", priority=broker.most_urgent)
    staffed_app.witness.release(key)
    wait_until(lambda: len(staffed_app.witness.reports(subject)) == 6, WAIT)
    assert staffed_app.witness.reports(subject).index("high") <= 1


def test_nothing_is_left_in_hand(staffed_app: CeleryApp) -> None:
    assert staffed_app.send("add", 1, 1).get(timeout=WAIT) == 2
    wait_until(lambda: staffed_app.ask("active") == [], WAIT)
    wait_until(lambda: staffed_app.waiting() == 0, WAIT)


# Stock workers end at the first message whose header cannot be decoded, and each one after it again.
@pytest.mark.parametrize("broker", ["dq", "zookeeper", "sqlite"], indirect=True)
@pytest.mark.logged_error(
    "it is not a valid task", "DecodeError", "could not be recorded", "Pool callback raised", "InvalidKey"
)
def test_no_message_ends_the_worker(staffed_app: CeleryApp) -> None:
    worker = staffed_app.shared_worker
    assert worker is not None
    lost = worker.log.count("Connection to broker lost")
    with staffed_app.app.connection_for_write() as connection:
        sent = publish_kinds(connection, staffed_app.queue, "add", some_kinds())
    assert len(sent) > 50
    assert staffed_app.send("add", 2, 3).get(timeout=WAIT) == 5
    wait_until(lambda: staffed_app.waiting() == 0, WAIT)
    assert worker.alive
    assert worker.log.count("Connection to broker lost") == lost
    # None keeps a slot of the pool.
    wait_until(lambda: staffed_app.ask("active") == [], WAIT)
    for _ in range(2):  # the lines of the first follow what is logged of the others
        assert staffed_app.send("add", 2, 3).get(timeout=WAIT) == 5


@pytest.mark.parametrize("broker", ["dq"], indirect=True)
@pytest.mark.logged_error("Control command error")
def test_no_broadcast_ends_the_worker(staffed_app: CeleryApp, redis_server: RedisServer) -> None:
    worker = staffed_app.shared_worker
    assert worker is not None
    assert staffed_app.ask("ping") == {"ok": "pong"}
    lost = worker.log.count("Connection to broker lost")
    with redis.Redis(port=redis_server.port) as client:
        for payload in BROADCASTS:
            assert client.publish(f"/{BROKER_DB}.celery.pidbox", payload) > 0
    assert staffed_app.ask("ping") == {"ok": "pong"}
    assert worker.alive
    assert worker.log.count("Connection to broker lost") == lost
