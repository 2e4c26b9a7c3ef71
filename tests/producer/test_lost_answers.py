"""A call whose answer is lost is sent again with the same sequence, so it is stored once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from kombu.exceptions import OperationalError

from celery_dq.dedup.machine import Verdict
from tests.broker.proxy import Proxy
from tests.producer.conftest import Stored

MARK = "look-for-this"


@pytest.fixture
def app(distant_app: Any) -> Any:
    def work(a: Any = 0) -> None: ...

    distant_app.task(name="plain", shared=False)(work)
    distant_app.task(name="keyed", shared=False, dedup={"key": "{a}"})(work)
    return distant_app


@pytest.mark.parametrize("name", ["plain", "keyed"])
def test_a_quick_publish_that_is_repeated_is_stored_once(
    app: Any, proxy: Proxy, stored: Stored, quick: list[Any], name: str
) -> None:
    task = app.tasks[name]
    first = [task.delay(number).id for number in range(3)]
    proxy.drop_answers_to, proxy.drops_left = MARK.encode(), 2
    result = task.delay(MARK)
    assert (proxy.dropped, quick[-1] is result) == (2, True)
    last = task.delay("last").id
    assert stored.ids("celery") == [*first, result.id, last]
    if name == "keyed":
        assert (result.verdict, result.covering) == (Verdict.ACCEPT, result.id)


def test_a_connection_that_is_lost_at_any_point_of_any_way_costs_a_retry(
    app: Any, proxy: Proxy, stored: Stored
) -> None:
    plain, keyed, numbers = app.tasks["plain"], app.tasks["keyed"], count()

    def parent(queue: str) -> None:
        plain.apply_async((next(numbers),), queue=queue)

    in_task = app.task(name="parent", shared=False)(parent)
    ways: dict[str, Callable[[str], object]] = {
        "a template": lambda queue: plain.apply_async((next(numbers),), queue=queue),
        "Celery's way": lambda queue: plain.apply_async((next(numbers),), queue=queue, countdown=1),
        "a dedup key": lambda queue: keyed.apply_async((next(numbers),), queue=queue),
        "by name": lambda queue: app.send_task("elsewhere", (next(numbers),), queue=queue),
        "in a task": lambda queue: in_task.apply(args=(queue,), throw=True),
        "without retries": lambda queue: plain.apply_async((next(numbers),), queue=queue, retry=False),
    }
    for call in ways.values():
        for _ in range(3):
            call("known")  # makes the templates
    # Which answers are lost too, and which calls go to a new queue, is a choice: all pass.
    cases = [(way, "known", False) for way in ways]
    cases += [("a template", "known", True), ("in a task", "known", True), ("Celery's way", "new", False)]
    for way, kind, proxy.drops_answer in cases:
        for point in count():
            queue = kind if kind == "known" else f"new-{point}"
            before = stored.count(queue)
            proxy.cut_all()
            proxy.requests_left = point
            try:
                ways[way](queue)
            except OperationalError:
                assert way == "without retries"
                assert stored.count(queue) - before <= 1
            else:
                assert stored.count(queue) - before == 1, (way, kind, point)
            if proxy.requests_left is not None:
                break
        assert point > 3
        proxy.requests_left = None


@pytest.mark.parametrize("buffered_before", [True, False], ids=["template", "Celery's way"])
def test_a_batch_of_the_buffer_that_is_repeated_is_stored_once(
    app: Any, proxy: Proxy, stored: Stored, buffered_before: bool
) -> None:
    task = app.tasks["plain"]
    first = [task.apply_async((number,), buffered=True).id for number in range(3 * buffered_before)]
    assert app.dq.buffer.flush(30) == 0
    proxy.drop_answers_to, proxy.drops_left = MARK.encode(), 2
    ids = [task.apply_async((value,), buffered=True).id for value in (1, MARK, 2)]
    assert app.dq.buffer.flush(30) == 0
    assert proxy.dropped == 2
    assert stored.ids("celery") == [*first, *ids]
