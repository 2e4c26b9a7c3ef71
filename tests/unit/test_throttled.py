"""The exception ``Throttled``: its arguments, its way between processes, and eager tasks."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.app.trace import build_tracer
from celery.exceptions import Reject, Retry
from celery.signals import task_retry

import celery_dq
from celery_dq import AnyOf, InvalidRequest, InvalidTenant, Throttled
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.partition_replies import PauseCause
from celery_dq.worker.task_events import error_of


@pytest.mark.parametrize(
    ("retry_after", "seconds"),
    [
        (30, 30.0),
        (0.5, 0.5),
        (0, 0.0),
        (timedelta(minutes=2), 120.0),
        ("120", 120.0),
        (" 7 ", 7.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("Wednesday, 21-Oct-15 07:28:00 GMT", 0.0),
        ("Wed Oct 21 07:28:00 2015", 0.0),
    ],
)
def test_retry_after_has_many_forms(retry_after: Any, seconds: float) -> None:
    throttled: Any = Throttled(retry_after)
    assert (throttled.retry_after, throttled.when) == (seconds, seconds)
    assert isinstance(throttled, Retry)


def test_a_date_counts_from_now() -> None:
    later = datetime.now(timezone.utc) + timedelta(seconds=100)
    assert 98 < Throttled(format_datetime(later, usegmt=True)).retry_after <= 100
    # Without a zone it is UTC, whatever the zone of this machine.
    assert 98 < Throttled(later.strftime("%a, %d %b %Y %H:%M:%S")).retry_after <= 100


@pytest.mark.parametrize(
    "retry_after",
    [-1, float("nan"), float("inf"), 10**400, True, "", "soon", "-3", "9" * 400, b"3", timedelta(-1), [3]],
)
def test_a_wrong_retry_after_is_named_with_the_forms(retry_after: Any) -> None:
    with pytest.raises(InvalidRequest, match="give seconds from 0 to 3200000000, a timedelta") as raised:
        Throttled(retry_after)
    assert f"retry_after = {retry_after!r}" in str(raised.value)


def test_a_missing_header_has_a_remedy_of_its_own() -> None:
    headers: dict[str, Any] = {}
    header: Any = headers.get("Retry-After")
    with pytest.raises(InvalidRequest, match=r"headers.get\('Retry-After', 30\)"):
        Throttled(header)


def test_the_tenants_are_named_and_checked() -> None:
    assert Throttled(1).tenants == ()
    assert Throttled(1, tenant=7).tenants == ("7",)
    assert Throttled(1, tenant=AnyOf("gpu-2", "gpu-1")).tenants == ("gpu-1", "gpu-2")
    wrong: Any = 1.5
    with pytest.raises(InvalidTenant, match="Throttled: tenant"):
        Throttled(1, tenant=wrong)
    with pytest.raises(InvalidRequest, match="reason = 429 is of type int; give a str"):
        Throttled(1, reason=429)  # type: ignore[arg-type]


def test_it_survives_pickling() -> None:
    sent = Throttled("3", AnyOf("gpu-2", "gpu-1"), "429 of api" * 100)
    found = pickle.loads(pickle.dumps(sent))
    for each in (sent, found):
        assert (each.retry_after, each.tenants, each.when) == (3.0, ("gpu-1", "gpu-2"), 3.0)
        assert len(each.reason) == 500
        assert str(each).startswith("throttled for 3 s: 429 of api")
        assert 2_000_000 < each.remaining_us < 3_000_000


class RateLimited(Throttled):
    """A subclass with arguments of its own."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(answer["Retry-After"], reason="429")
        self.unpicklable = lambda: answer


def test_a_subclass_with_other_arguments_survives_pickling() -> None:
    found = pickle.loads(pickle.dumps(RateLimited({"Retry-After": "3"})))
    assert (type(found), found.retry_after, found.reason) == (Throttled, 3.0, "429")
    assert 2_000_000 < found.remaining_us < 3_000_000


def test_the_time_since_the_raise_counts() -> None:
    throttled = Throttled(0.01)
    wait_until(lambda: throttled.remaining_us == 0, 30)
    assert throttled.retry_after == 0.01
    found = pickle.loads(pickle.dumps(throttled))
    assert found.remaining_us == 0


def test_a_cause_that_another_program_has_written_is_none() -> None:
    cause = PauseCause("429 of \x1b[31m", "shop.call", "id")
    assert PauseCause.unpack(cause.pack().encode()) == cause
    assert str(cause) == r"task shop.call[id] was throttled (429 of \x1b[31m)"
    for stored in (None, b"", b"{", b"[]", b"3", b'"x"', b'{"reason": 1}', b"\xff"):
        assert PauseCause.unpack(stored) is None


@pytest.fixture
def app() -> Iterator[Any]:
    with Celery("eager", broker="memory://", backend="cache+memory://", set_as_current=False) as app:
        yield celery_dq.setup(app)


@pytest.mark.parametrize(("most", "state"), [(None, "SUCCESS"), (2, "SUCCESS"), (1, "RETRY")])
def test_an_eager_task_runs_again_at_once(app: Any, most: int | None, state: str) -> None:
    attempts: list[int] = []

    def call(self: Any) -> int:
        attempts.append(self.request.retries)
        if len(attempts) < 3:
            raise Throttled(3600)
        return len(attempts)

    task = app.task(bind=True, max_retries=most, shared=False)(call)
    app.conf.task_always_eager = True
    assert task.delay().state == state
    assert attempts == [0, 1, 2][: 3 if most != 1 else 2]


def test_a_wrong_argument_fails_the_task(app: Any) -> None:
    def call() -> None:
        raise Throttled("soon")

    result = app.task(shared=False)(call).apply()
    assert result.state == "FAILURE"
    assert isinstance(result.result, InvalidRequest)


@pytest.mark.parametrize("late", [True, False])
def test_a_task_that_cannot_be_sent_again_is_rejected(late: bool) -> None:
    """Celery's own retry does the same; a message with a late ack is requeued then."""
    with Celery("unreachable", broker="redis://127.0.0.1:1", set_as_current=False) as app:
        celery_dq.setup(app)
        app.conf.task_publish_retry = False

        def call() -> None:
            raise Throttled(1)

        task: Any = app.task(name="call", shared=False, ignore_result=True, acks_late=late)(call)
        trace = build_tracer("call", task, app=app)
        request = {"id": "7d3c", "delivery_info": {}, "properties": {"delivery_tag": "1"}}
        error: Any = error_of(trace("7d3c", [], {}, request)[0])
        assert (type(error), error.requeue) == (Reject, late)
        assert error.reason.startswith("OperationalError: ")


@pytest.mark.parametrize("fails", ["backend", "on_retry"])
def test_a_task_whose_retry_cannot_be_recorded_stays_throttled(
    app: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    """Celery would report an error. The worker would end the message, and the task would be lost."""

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("away")

    def call() -> None:
        raise Throttled(1)

    task: Any = app.task(name="call", shared=False)(call)
    if fails == "backend":
        monkeypatch.setattr(app.backend, "mark_as_retry", fail)
    else:
        task.on_retry = fail
    received: list[Any] = []

    def receive(reason: Any, **_: Any) -> None:
        received.append(reason)

    trace = build_tracer("call", task, app=app)
    request = {"id": "7d3c", "delivery_info": {}, "properties": {"delivery_tag": "dq:{online/q/0}/1/7d3c"}}
    task_retry.connect(receive)
    try:
        error = error_of(trace("7d3c", [], {}, request)[0])
    finally:
        task_retry.disconnect(receive)
    assert isinstance(error, Throttled)
    assert received == [error]
    assert "its state RETRY could not be recorded: ConnectionError: away" in caplog.text


def test_a_task_that_celery_cancels_was_not_throttled(app: Any) -> None:
    """Celery sends the signal then without a reason, in the main process of the worker."""

    def call() -> None:
        """Stand for any task."""

    task: Any = app.task(name="call", shared=False)(call)
    answers = task_retry.send(sender=task, request=Context({"id": "7d3c"}), einfo=None)
    assert [answer for _, answer in answers if answer is not None] == []
