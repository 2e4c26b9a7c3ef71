"""Messages that name a task but are not Celery's: they become dead letters, and the worker continues."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.worker import state

import celery_dq
from celery_dq.errors import InvalidMessage
from celery_dq.testing.waiting import wait_until

WAIT = 20


@pytest.fixture(scope="module")
def app(redis_server: Any) -> Iterator[Any]:
    """An app with a worker that gets all messages of this module."""
    url = redis_server.url(0)
    with Celery("shop", broker=url.replace("redis", "dq-redis", 1), backend=url, set_as_current=False) as app:
        celery_dq.setup(app)
        app.conf.update(task_default_queue="foreign", broker_connection_retry_on_startup=True)

        @app.task(shared=False, name="echo")
        def echo(word: str) -> str:
            return word

        with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=WAIT):
            yield app
        redis_server.flush(0)
        producers: Any = app.pool
        producers.force_close_all()


@pytest.mark.logged_error("Message f goes to the dead letters: it is not a valid task")
@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ([[], {}], {}),
        (42, {}),
        (None, {}),
        ({"word": "x"}, {}),
        (["x", {}, {}, 1], {}),
        ([["x"], {}, {}], {"timelimit": 5}),
        ([["x"], {}, {}], {"retries": "many"}),
        ([["x"], 7, None], {}),
        ([["x"], {}, {}], {"task": ["echo"]}),
        ([["x"], {}, {}], {"expires": "2199-01-01T00:00:00+00:00", "group": 7, "root_id": []}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_foreign_message_stops_no_worker(app: Any, body: Any, headers: Any) -> None:
    with app.connection_for_write() as connection:
        connection.Producer().publish(
            body, routing_key="foreign", serializer="json", headers={"id": "f", "task": "echo", **headers}
        )
    assert app.tasks["echo"].delay("hello").get(timeout=WAIT) == "hello"
    wait_until(lambda: app.dq.queues["foreign"].snapshot().held == 0, WAIT)
    assert app.dq.queues["foreign"].depth == 0
    # A reserved request holds a slot of the pool.
    wait_until(lambda: not state.reserved_requests, WAIT)
    app.dq.dead_letters["foreign"].purge()


@pytest.mark.logged_error("Message reason goes to the dead letters: it is not a valid task")
def test_the_reason_is_kept(app: Any) -> None:
    with app.connection_for_write() as connection:
        connection.Producer().publish(
            [[], {}], routing_key="foreign", serializer="json", headers={"id": "reason", "task": "echo"}
        )
    wait_until(lambda: len(app.dq.dead_letters["foreign"]), WAIT)
    (letter,) = app.dq.dead_letters["foreign"].list()
    assert letter.id == "reason"
    assert letter.reason.startswith("invalid task: ValueError")


@pytest.mark.parametrize("option", ["eta", "expires"])
def test_a_time_that_redis_cannot_count_exactly_is_refused(app: Any, option: str) -> None:
    with pytest.raises(InvalidMessage, match=f"{option} = 2999"):
        app.tasks["echo"].apply_async(("x",), **{option: datetime(2999, 1, 1, tzinfo=timezone.utc)})


def test_an_eta_before_1970_is_past(app: Any) -> None:
    eta = datetime(1960, 1, 1, tzinfo=timezone.utc)
    assert app.tasks["echo"].apply_async(("x",), eta=eta).get(timeout=WAIT) == "x"
