"""The attributes of a request and of a result that no broker has set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

import celery_dq


@pytest.fixture
def app() -> Iterator[Any]:
    with Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False) as app:
        celery_dq.setup(app)
        yield app


def task_of(app: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    make: Callable[[Callable[..., Any]], Any] = app.task(bind=True, shared=False, **options)
    return make


@pytest.mark.parametrize("by_setting", [True, False], ids=["task_always_eager", "apply"])
def test_an_eager_task_has_every_attribute_of_the_request(app: Any, by_setting: bool) -> None:
    app.conf.task_always_eager = by_setting

    @task_of(app)
    def look(self: Any) -> Any:
        request = self.request
        return [request.dq_token, request.dq_deliveries, request.dq_queue, request.get("dq_token")]

    result = look.delay() if by_setting else look.apply()
    assert result.get() == [0, 0, "", 0]


def test_a_task_that_is_called_as_a_function_has_them_too(app: Any) -> None:
    @task_of(app)
    def look(self: Any) -> Any:
        return [self.request.dq_token, self.request.dq_deliveries]

    assert look() == [0, 0]


def test_an_eager_retry_inherits_none_of_them(app: Any) -> None:
    @task_of(app, max_retries=1)
    def again(self: Any) -> Any:
        if not self.request.retries:
            raise self.retry(countdown=0)
        return [self.request.dq_token, self.request.headers]

    assert again.apply(headers={"dq_token": 7}).get() == [0, {"dq_token": 7}]
