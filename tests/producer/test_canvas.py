"""Groups, chords and chains through the buffer give the same messages as without it."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from celery import chain, chord, group
from hypothesis import HealthCheck, given, settings, strategies as st
from kombu.exceptions import OperationalError

from celery_dq.app.publishing.buffer_stage import LazyPoolProducer
from celery_dq.testing.servers import RedisServer
from tests.producer.conftest import MakeApp, Stored

UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def job_of(app: Any) -> Any:
    def job(*args: Any, **kwargs: Any) -> None: ...

    app.conf.task_routes = {"job": "push"}
    return app.task(name="job", shared=False)(job)


def normalised(stored: Stored) -> list[Any]:
    """Empty the queue; return its messages in order, with ids replaced by the order of their appearance."""
    names: dict[str, str] = {}
    messages = [stored.message("push", task_id) for task_id in stored.ids("push")]
    text = json.dumps(messages, sort_keys=True)
    stored.client.flushdb()
    found: list[Any] = json.loads(
        UUID.sub(lambda match: names.setdefault(match[0], f"id {len(names)}"), text)
    )
    return found


leaves = st.tuples(st.just("task"), st.lists(st.integers() | st.text(max_size=5), max_size=2))
canvases = st.recursive(
    leaves,
    lambda inner: (
        st.tuples(st.just("group"), st.lists(inner, min_size=1, max_size=3))
        | st.tuples(st.just("chain"), st.lists(inner, min_size=1, max_size=3))
        | st.tuples(st.just("chord"), st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=5,
)


def build(job: Any, kind: str, parts: list[Any]) -> Any:
    if kind == "task":
        return job.si(*parts)
    made = [build(job, *part) for part in parts]
    if kind == "group":
        return group(made)
    return chain(*made) if kind == "chain" else chord(made, job.si("body"))


@pytest.fixture(autouse=True)
def results_go_while_their_backend_is_there(redis_url: str) -> Iterator[None]:
    """Collect the results of a group, which refer to each other and unsubscribe when they are collected."""
    yield
    gc.collect()


@pytest.fixture
def shop(make_app: MakeApp, redis_url: str) -> Any:
    app: Any = make_app(result_backend=redis_url)
    job_of(app)
    return app


@given(canvases, st.sampled_from([{}, {"priority": 3}, {"headers": {"x-shop": "a"}}]))
@settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_canvas_is_celerys(
    shop: Any, stored: Stored, canvas: tuple[str, list[Any]], options: dict[str, Any]
) -> None:
    buffer, job = shop.dq.buffer, shop.tasks["job"]
    before = buffer.inspect().counters.get("accepted", 0)
    build(job, *canvas).apply_async(**options)
    accepted = buffer.inspect().counters["accepted"] - before
    assert buffer.flush(30) == 0
    assert accepted == stored.count("push") > 0, "not all of it was buffered"
    buffered = normalised(stored)
    with buffer.buffered(False):
        build(job, *canvas).apply_async(**options)
    assert normalised(stored) == buffered


def test_a_dead_broker_does_not_hinder_a_chord(make_app: MakeApp, redis_url: str) -> None:
    with RedisServer() as server:
        app: Any = make_app(server.url(scheme="dq-redis"), result_backend=redis_url)
        job = job_of(app)
        server.kill()
        result = chord([job.si(number) for number in range(5)], job.si("body")).apply_async()
        group(job.si(1), job.si(2)).delay()
        chain(job.si(1), group(job.si(2), job.si(3))).delay()
        assert len(app.dq.buffer) == 8
        assert result.id
        server.start()
        assert app.dq.buffer.flush(30) == 0
        there = Stored(server.url())
        assert there.count("push") == 8
        there.client.close()


def test_one_call_of_a_group_may_go_directly(make_app: MakeApp, stored: Stored) -> None:
    app: Any = make_app(dq_buffer_linger="60s")
    job = job_of(app)
    group(job.si(1), job.si(2).set(buffered=False), job.si(3)).apply_async()
    assert (app.dq.buffer.inspect().counters["accepted"], stored.count("push")) == (2, 1)
    group(job.si(1), job.si(2)).apply_async(buffered=False)
    assert stored.count("push") == 3


def test_a_group_without_the_buffer_takes_one_producer_of_the_pool(make_app: MakeApp, stored: Stored) -> None:
    app: Any = make_app(dq_buffer=False, broker_pool_limit=1)
    job = job_of(app)
    for _ in range(3):  # it is released each time
        group(job.si(1), job.si(2)).apply_async()
    assert stored.count("push") == 6
    assert app.producer_pool._dirty == set()


def test_a_failing_group_gives_the_producer_back(make_app: MakeApp) -> None:
    app: Any = make_app(
        "dq-redis://127.0.0.1:1/0", dq_buffer=False, task_publish_retry=False, broker_pool_limit=1
    )
    job = job_of(app)
    for _ in range(3):
        with pytest.raises(OperationalError):
            group(job.si(1), job.si(2)).apply_async()
    assert app.producer_pool._dirty == set()


def test_others_get_a_real_producer(make_app: MakeApp) -> None:
    with make_app().producer_or_acquire() as producer:
        assert type(producer) is not LazyPoolProducer
