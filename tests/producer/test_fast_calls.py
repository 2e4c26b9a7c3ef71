"""The fast path makes, byte for byte, the same message of a call as Celery's own code."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, signals
from celery.result import EagerResult
from celery.utils.saferepr import saferepr
from hypothesis import example, given, settings, strategies as st
from kombu import Exchange, Queue
from kombu.exceptions import EncodeError

import celery_dq
from celery_dq.app.api.api import dq_of
from celery_dq.app.publishing.message_template import (
    KNOWN_HEADERS,
    MessageTemplates,
    plain_args,
    plain_kwargs,
)
from celery_dq.app.publishing.results import Ids, prepare_for_results
from celery_dq.app.publishing.task_apply_async import TaskApplyAsync
from celery_dq.app.publishing.template_stage import TemplateStage
from celery_dq.producer.buffering_producer import BufferingProducer
from celery_dq.producer.sender import Addressed
from celery_dq.transport.redis.store.home import tenant_hash, tenant_hash_in
from tests.apps import task as make_task
from tests.producer.conftest import MakeApp, Stored

Call = tuple[Any, Any, dict[str, Any]]


class Colour(IntEnum):
    RED = 1


texts = st.text(max_size=30) | st.sampled_from(["it's", '"', "%s", "@dq-id@", "a\\b", "x" * 600, "é☃\udc80"])
plain = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(
    plain | st.just(Colour.RED) | st.dates() | st.uuids() | st.decimals(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(plain, max_size=40), st.dictionaries(texts, plain, max_size=40))
@example([1], {})
@example(["it's"], {"it's": "it's"})
@settings(deadline=None, max_examples=150)
def test_representations_are_celerys(args: list[Any], kwargs: dict[str, Any]) -> None:
    for made, wanted in (
        (plain_args(tuple(args)), saferepr(tuple(args), 1024)),
        (plain_args(args), saferepr(args or (), 1024)),
        (plain_kwargs(kwargs), saferepr(kwargs, 1024)),
    ):
        assert made is None or made == wanted


@given(st.lists(values, max_size=4), st.dictionaries(texts, values, max_size=4))
@settings(deadline=None, max_examples=100)
def test_other_representations_are_left_to_celery(args: list[Any], kwargs: dict[str, Any]) -> None:
    made = plain_args(tuple(args))
    assert made is None or made == saferepr(tuple(args), 1024)
    made = plain_kwargs(kwargs)
    assert made is None or made == saferepr(kwargs, 1024)


@pytest.mark.parametrize(("partitions", "version"), [(1, 4), (2, 8)])
def test_ids_are_uuids_and_of_an_own_version_with_partitions(partitions: int, version: int) -> None:
    with Celery("shop", broker="dq-redis://127.0.0.1:1/0", set_as_current=False) as app:
        app.conf.dq_queues = {"push": {"partitions": partitions}, "other": {"partitions": 1}}
        celery_dq.setup(app)
        source = Ids(app)
    ids = [(tenant, source.new(tenant.encode())) for tenant in ("", "é", "a" * 200) for _ in range(500)]
    assert len({each[9:] for _, each in ids}) == len(ids)
    for tenant, each in ids:
        parsed = uuid.UUID(each)
        assert (str(parsed), parsed.version, parsed.variant) == (each, version, uuid.RFC_4122)
        assert tenant_hash_in(each) == (tenant_hash(tenant) if partitions > 1 else None)


class Bench:
    """One app, and both paths of a call."""

    def __init__(self) -> None:
        app = Celery("shop", broker="dq-redis://127.0.0.1:1/0", set_as_current=False)
        app.conf.update(
            dq_buffer=True,
            dq_buffer_folder="",
            dq_buffer_max_block=0,
            task_routes={
                "routed": {"queue": "élan", "priority": 4},
                "slow.*": {"queue": "slow"},
                "topical": {"queue": "topic"},
                "tenanted": {"queue": "push"},
                "limited": {"priority": 2},
            },
            task_queues=[
                Queue("celery"),
                Queue("push", Exchange("push"), routing_key="push"),
                Queue("élan", Exchange("other", delivery_mode=1), routing_key="x"),
                Queue("slow"),
                Queue("topic", Exchange("topic", type="topic"), routing_key="#"),
            ],
        )
        celery_dq.setup(app)
        names = ("plain", "routed", "slow.one", "topical", "tenanted", "limited")
        extra: dict[str, dict[str, Any]] = {
            "tenanted": {"tenant": "{a}-x"},
            "limited": {"time_limit": 5, "soft_time_limit": 3, "ignore_result": True},
        }
        for name in names:
            make_task(app, name=name, **extra.get(name, {}))(work)
        app.finalize()
        self.app: Any = app
        self.names = names
        self.fast = MessageTemplates(app)
        self.sender = dq_of(app).make_sender(app)

    def celerys(self, name: str, args: Any, kwargs: Any, options: dict[str, Any]) -> Addressed:
        """Return the message that Celery's path puts into the buffer; it also makes the template."""
        made: list[Addressed] = []

        def accept(message: dict[str, Any], exchange: str, key: str, declare: Any) -> Addressed:
            headers = dict(message["headers"])
            addressed = self.sender.address(message, exchange, key, declare)
            kind = self.fast.kind_of(name, options)
            if kind is not None and kind not in self.fast.by_kind:
                routed = {each: options[each] for each in ("priority",) if each in options}
                known = {each: value for each, value in headers.items() if each in KNOWN_HEADERS}
                learnt = dict(message, headers=known)
                self.fast.learn(kind, addressed.lane, learnt, exchange, key, routed)
            return addressed

        prepare_for_results(self.app, self.app.dq.deadline)
        Celery.send_task(
            self.app, name, args, kwargs, **{**options, "producer": BufferingProducer(accept, made.append)}
        )
        return made[0]

    def quick(self, name: str, args: Any, kwargs: Any, options: dict[str, Any]) -> Addressed | None:
        kind = self.fast.kind_of(name, options)
        template = None if kind is None else self.fast.by_kind.get(kind)
        given = [options.get(each) for each in ("task_id", "tenant", "headers")]
        filled = template and self.fast.fill(template, args, kwargs, *given)
        if template is None or filled is None:
            return None
        return Addressed(template.lane, filled.id.encode(), filled.record)


def work(a: Any = 0, *args: Any, **kwargs: Any) -> None: ...


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.app.dq.buffer.close(0)
    made.app.close()


def answer_of(app: Any) -> str:
    """Whether a template makes a call of the app now."""
    (stage,) = (each for each in app.send_task.stages if isinstance(each, TemplateStage))
    return stage.choice.answer()


some_options = st.fixed_dictionaries(
    {},
    optional={
        "queue": st.sampled_from(["push", "élan", "topic", None]),
        "priority": st.integers(0, 9) | st.none(),
        "tenant": st.sampled_from(["42", 7, "é"]),
        "ignore_result": st.booleans(),
        "time_limit": st.integers(1, 5),
        "soft_time_limit": st.just(2),
        "countdown": st.integers(0, 10),
        "expires": st.integers(1, 100),
        "headers": st.sampled_from(
            [{"x": 1}, {"é": {"a": [None, "%s"]}}, {"shadow": "x"}, {"id": "mine"}, {}, None]
        ),
        "shadow": st.just("other"),
        "serializer": st.sampled_from(["json", "pickle", None]),
        "delivery_mode": st.sampled_from([1, 2, None]),
        "compression": st.sampled_from([None, "zlib"]),
        "group_id": st.just("g"),
        "routing_key": st.just("r"),
        "retry": st.just(True),
    },
)


def test_a_filled_template_is_celerys_message(bench: Bench) -> None:
    def is_quick(name: str, args: Any, kwargs: Any, options: dict[str, Any]) -> bool:
        """Compare both paths of a call; return whether a template made its message."""
        options = {**options, "task_id": str(uuid.uuid4())}
        try:
            wanted = bench.celerys(name, args, kwargs, dict(options))
        except Exception:
            return False  # a refused call makes no template, and so is refused each time
        made = bench.quick(name, args, kwargs, options)
        assert made in (None, wanted)
        return made is not None

    @given(
        st.sampled_from(bench.names),
        st.lists(values, max_size=3).map(tuple) | st.none() | st.lists(plain, max_size=2),
        st.dictionaries(st.sampled_from(["b", "c", "it's", "%"]), values, max_size=3) | st.none(),
        st.just({}) | some_options,
    )
    @settings(deadline=None, max_examples=400)
    def compare(name: str, args: Any, kwargs: Any, options: dict[str, Any]) -> None:
        is_quick(name, args, kwargs, options)

    # Else the comparison would be one of nothing.
    quick = [name for name in bench.names if is_quick(name, ("x", 1), {"b": None}, {"tenant": "42"})]
    assert quick == ["plain", "slow.one", "tenanted"]
    compare()


def test_an_error_is_celerys_error(bench: Bench) -> None:
    task = bench.app.tasks["plain"]
    for _ in range(2):
        task.delay(1)
        with pytest.raises(EncodeError):
            task.delay(object())
        with pytest.raises(TypeError):
            bench.app.send_task("plain", 3)


def test_observers_of_messages_get_them_all(make_app: MakeApp, stored: Stored) -> None:
    app = make_app()
    task: Any = app.task(name="plain", shared=False)(work)
    for _ in range(3):
        task.delay(1)
    assert answer_of(app) == "plain"

    def receiver(**_: Any) -> None: ...

    signals.before_task_publish.connect(receiver)
    try:
        assert answer_of(app) == "observed"
    finally:
        signals.before_task_publish.disconnect(receiver)
    assert answer_of(app) == "plain"
    app.conf.task_routes = {"plain": {"queue": "elsewhere"}}
    amqp: Any = app.amqp
    amqp._handle_conf_update(task_routes=app.conf.task_routes)
    task.delay(1)
    assert app.dq.buffer.flush(30) == 0
    assert (stored.count("celery"), stored.count("elsewhere")) == (3, 1)


@pytest.mark.parametrize(
    "conf",
    [
        {"task_protocol": 1},
        {"task_serializer": "pickle"},
        {"task_compression": "zlib"},
        {"task_routes": [lambda name, args, kwargs, options, task=None, **_: {"queue": f"q{args[0]}"}]},
    ],
)
def test_an_app_with_ways_of_its_own_goes_them(
    make_app: MakeApp, stored: Stored, conf: dict[str, Any]
) -> None:
    app = make_app(**conf)
    task: Any = app.task(name="plain", shared=False)(work)
    for number in range(3):
        task.apply_async((number,))
    assert answer_of(app) == "celery"
    assert app.dq.buffer.flush(30) == 0
    if "task_routes" in conf:
        assert [stored.count(f"q{number}") for number in range(3)] == [1, 1, 1]


def test_the_result_of_a_quick_call_is_an_ordinary_one(make_app: MakeApp, redis_url: str) -> None:
    app = make_app(result_backend=redis_url)
    task: Any = app.task(name="plain", shared=False)(work)
    slow: Any = task.delay(1)
    quick: Any = task.delay(1)
    for result in (slow, quick):
        assert isinstance(result, app.AsyncResult)
        assert (result.state, result.parent, result.ignored) == ("PENDING", None, False)
        assert result == app.AsyncResult(result.id)
        wire: Any = result.as_tuple()
        assert wire == ((result.id, None), None)
    seen: list[Any] = []
    quick.then(seen.append)
    app.backend.store_result(quick.id, 5, "SUCCESS")
    assert quick.get(timeout=30) == 5
    assert seen == [quick]
    assert {*vars(slow)} - {*vars(task.delay(1))} == {"app", "backend", "on_ready"}  # the class has them


@pytest.mark.parametrize("buffered", [True, False])
def test_a_quick_call_of_a_task_takes_its_own_headers_and_tenant(
    make_app: MakeApp, stored: Stored, monkeypatch: pytest.MonkeyPatch, buffered: bool
) -> None:
    app = make_app(dq_buffer=buffered)
    task: Any = app.task(name="plain", shared=False)(work)
    own = {"headers": {"trace": {"span": "é"}}, "tenant": 7}
    first = task.apply_async((1,), **own)
    for _ in range(2):
        task.delay(1)
    assert isinstance(task.apply_async, TaskApplyAsync)
    with monkeypatch.context() as patch:
        patch.setattr(TemplateStage, "send_from", None)  # no call passes the stages
        second = task.apply_async((1,), **own)
    # A header of Celery's is Celery's to write.
    shadowed = task.apply_async((1,), headers={"shadow": "other"})
    assert app.dq.buffer.flush(30) == 0
    assert [stored.record("celery", each.id).tenant for each in (first, second)] == ["7", "7"]
    (slow, _, _), (fast, _, _) = (stored.message("celery", each.id) for each in (first, second))
    own_ids = {"id", "root_id"}
    assert {key: slow[key] for key in slow.keys() - own_ids} == {
        key: fast[key] for key in fast.keys() - own_ids
    }
    assert fast["trace"] == {"span": "é"}
    assert stored.message("celery", shadowed.id)[0]["shadow"] == "other"


@pytest.mark.parametrize("buffered", [True, False])
def test_a_quick_task_still_checks_its_arguments_and_heeds_changes(
    make_app: MakeApp, stored: Stored, buffered: bool
) -> None:
    app = make_app(dq_buffer=buffered)
    ran: list[int] = []

    def job(a: int) -> int:
        ran.append(a)
        return a

    task: Any = app.task(name="job", shared=False)(job)
    for _ in range(4):
        task.delay(1)
    assert isinstance(task.apply_async, TaskApplyAsync)
    with pytest.raises(TypeError):
        task.delay(1, 2)
    with app.dq.buffer.buffered(not buffered):
        task.delay(1)
    if buffered:
        assert stored.count("celery") >= 1
    else:
        assert app.dq.buffer.inspect().counters["accepted"] == 1
    task.apply_async((1,), buffered=not buffered, priority=3)
    task.apply_async((1,), countdown=60)
    assert task.apply_async((1,), task_id="mine").id == "mine"
    app.conf.task_always_eager = True
    assert task.delay(7).get() == 7
    app.conf.task_always_eager = False
    assert ran == [7]
    assert app.dq.buffer.flush(30) == 0
    assert stored.count("celery") == 8
    assert stored.record("celery", "mine").task == "job"


@pytest.mark.parametrize("buffered", [True, False])
def test_a_quick_task_heeds_whether_its_result_is_ignored_now(
    make_app: MakeApp, stored: Stored, buffered: bool
) -> None:
    app = make_app(dq_buffer=buffered)
    task: Any = app.task(name="plain", shared=False, ignore_result=True)(work)
    for _ in range(2):
        task.delay(1)
    assert isinstance(task.apply_async, TaskApplyAsync)
    task.ignore_result = False
    kept = task.delay(1)
    assert app.dq.buffer.flush(30) == 0
    assert (kept.ignored, stored.message("celery", kept.id)[0]["ignore_result"]) == (False, False)


@pytest.mark.parametrize("buffered", [True, False])
def test_a_quick_task_heeds_whether_it_is_buffered_now(make_app: MakeApp, buffered: bool) -> None:
    app = make_app(dq_buffer=buffered)
    task: Any = app.task(name="plain", shared=False)(work)
    for _ in range(2):
        task.delay(1)
    task.buffered = not buffered
    for _ in range(3):
        task.delay(1)
    assert app.dq.buffer.flush(30) == 0
    assert app.dq.buffer.inspect().counters["accepted"] == (2 if buffered else 3)


@pytest.mark.parametrize("buffered", [True, False])
def test_a_quick_task_heeds_a_changed_default_queue(
    make_app: MakeApp, stored: Stored, buffered: bool
) -> None:
    app = make_app(dq_buffer=buffered)
    task: Any = app.task(name="plain", shared=False)(work)
    for _ in range(2):
        task.delay(1)
    app.conf.task_default_queue = "other"
    task.delay(1)
    app.send_task("plain", (1,))
    assert app.dq.buffer.flush(30) == 0
    assert (stored.count("celery"), stored.count("other")) == (2, 2)


def test_a_quick_task_heeds_a_changed_settings_object(dq_url: str) -> None:
    # Django's `override_settings` changes the object that Celery reads.
    settings = SimpleNamespace(CELERY_BROKER_URL=dq_url)
    with Celery("eager", set_as_current=False) as app:
        celery_dq.setup(app)
        app.config_from_object(settings, namespace="CELERY")
        task: Any = app.task(name="plain", shared=False)(work)
        for _ in range(2):
            task.delay(1)
        assert isinstance(task.apply_async, TaskApplyAsync)
        settings.CELERY_TASK_ALWAYS_EAGER = True
        assert isinstance(task.delay(1), EagerResult)
        settings.CELERY_TASK_ALWAYS_EAGER = False
        assert not isinstance(task.delay(1), EagerResult)


def test_a_queue_may_be_called_like_an_option(make_app: MakeApp) -> None:
    fast = MessageTemplates(make_app())
    kinds = [
        fast.kind_of("shop", options)
        for options in (
            {},
            {"queue": None},
            {"queue": None, "priority": None},
            {"queue": "priority"},
            {"queue": None, "priority": None, "serializer": None, "time_limit": None},
            {"queue": "priority", "serializer": "time_limit"},
        )
    ]
    assert None not in kinds
    assert len(set(kinds)) == len(kinds)
