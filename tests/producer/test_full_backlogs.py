"""Calls of a tenant with as many messages waiting as its ``max_waiting`` allows."""

from __future__ import annotations

import asyncio
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from celery.signals import before_task_publish
from kombu import Queue
from kombu.exceptions import OperationalError

from celery_dq import QueueFull
from celery_dq.app.publishing.direct_stage import DirectStage
from celery_dq.testing.waiting import wait_until
from celery_dq.transport.redis.store.server_errors import BacklogFull
from tests.broker.proxy import Proxy
from tests.children import in_child
from tests.producer.conftest import MakeApp, Stored

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1.2


def add_task(app: Any) -> Any:
    def work(*args: Any) -> None: ...

    def call(*args: Any) -> None:
        app.tasks["work"].apply_async(args, tenant="full")

    app.task(name="call", shared=False)(call)
    return app.task(name="work", shared=False)(work)


def bound(app: Any, count: int | None, how: str = "refuse", tenant: str = "full") -> None:
    app.dq.quotas.set("celery", tenant, max_waiting=count, when_full=how)


def circuit(app: Any) -> str:
    return str(app.dq.circuit())


def refusals(app: Any) -> int:
    return int(app.dq.queues["celery"].snapshot().counters.full)


def depth(app: Any, tenant: str) -> int:
    return int(app.dq.queues["celery"].tenant(tenant).waiting)


@pytest.fixture
def direct(make_app: MakeApp) -> Any:
    # Longer than a stall of the machine.
    app = make_app(dq_buffer=False, dq_breaker_failures=1, dq_publish_timeout=60)
    add_task(app)
    return app


def by_kombu(app: Any, number: int) -> None:
    with app.producer_or_acquire() as producer:
        publish(producer, **{f"k{number}": "full"})


def call(app: Any, number: int, **options: Any) -> Any:
    return app.tasks["work"].apply_async((number,), tenant="full", **options)


def observed(app: Any, number: int) -> None:
    def observe(**_: Any) -> None: ...

    before_task_publish.connect(observe)
    try:
        call(app, number)
    finally:
        before_task_publish.disconnect(observe)


WAYS: dict[str, Callable[[Any, int], Any]] = {
    "plain": lambda app, number: call(app, number),
    "with headers": lambda app, number: call(app, number, headers={"h": 1}),
    "with a receiver of a signal": observed,
    "on Celery's way": lambda app, number: call(app, number, link=()),
    "by name": lambda app, number: app.send_task("elsewhere", (number,), tenant="full"),
    "by a task": lambda app, number: app.tasks["call"].apply((number,), throw=True),
    "by kombu": by_kombu,
}


def clients(stored: Stored) -> set[str]:
    database = str(stored.client.get_connection_kwargs()["db"])
    return {each["id"] for each in stored.client.client_list() if each["db"] == database}


@pytest.mark.parametrize("way", WAYS)
def test_a_refused_call_raises_queue_full_and_costs_no_connection(
    direct: Any, stored: Stored, way: str
) -> None:
    make = WAYS[way]
    for number in range(3):
        make(direct, number)
    bound(direct, 4)
    make(direct, 3)
    ids = stored.ids("celery")
    before = clients(stored)
    text = "4 messages of tenant 'full' wait in queue 'celery', and its max_waiting allows no more"
    for number in range(4, 8):
        with pytest.raises(QueueFull, match=text) as raised:
            make(direct, number)
        error: Any = raised.value
        assert issubclass(type(error), OperationalError)
        copy = pickle.loads(pickle.dumps(error))
        assert (str(copy), copy.task_ids) == (str(error), error.task_ids)
    assert clients(stored) == before
    assert circuit(direct) == "closed"
    direct.tasks["work"].apply_async((9,), tenant="other")
    assert [each for each in stored.ids("celery") if each in ids] == ids
    assert stored.count("celery") == 5
    assert refusals(direct) == 4
    bound(direct, 5)
    make(direct, 10)
    assert stored.count("celery") == 6


def test_a_refused_call_closes_the_circuit_breaker(direct: Any) -> None:
    work = direct.tasks["work"]
    work.apply_async((0,), tenant="full")
    bound(direct, 1)
    (stage,) = (each for each in direct.send_task.stages if isinstance(each, DirectStage))
    stage.breaker._pause_s = 0.0
    stage.breaker.failed(OSError("away"), hung=True)
    assert circuit(direct) == "half-open"
    with pytest.raises(QueueFull):
        work.apply_async((1,), tenant="full")
    assert circuit(direct) == "closed"


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_waits_goes_on_when_there_is_room(direct: Any, stored: Stored, way: str) -> None:
    for number in range(3):
        WAYS[way](direct, number)
    bound(direct, 3, "wait")
    before = stored.ids("celery")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(WAYS[way], direct, 3)
        wait_until(lambda: refusals(direct) > 1, 30)
        assert stored.ids("celery") == before
        bound(direct, 4, "wait")
        waiting.result(30)
    assert stored.ids("celery")[:3] == before
    assert stored.count("celery") == 4


@pytest.mark.parametrize("way", ["plain", "by kombu"])
def test_a_call_waits_for_two_thirds_of_the_publish_timeout(make_app: MakeApp, way: str) -> None:
    app = make_app(dq_buffer=False, dq_breaker_failures=0, dq_publish_timeout=TIMEOUT_S)
    add_task(app)
    for number in range(3):
        WAYS[way](app, number)
    bound(app, 1, "wait")
    began = time.monotonic()
    with pytest.raises(QueueFull, match="two thirds of dq_publish_timeout"):
        WAYS[way](app, 3)
    assert time.monotonic() - began >= TIMEOUT_S / 2
    assert depth(app, "full") == 3


@pytest.mark.parametrize("options", [{}, {"link": ()}], ids=["plain", "on Celery's way"])
def test_calls_that_wait_leave_the_connections_to_other_tenants(
    make_app: MakeApp, stored: Stored, options: dict[str, Any]
) -> None:
    app = make_app(dq_buffer=False, broker_pool_limit=2, dq_publish_timeout=60)
    work = add_task(app)
    for number in range(3):
        work.apply_async((number,), tenant="full")
    bound(app, 3, "wait")
    with ThreadPoolExecutor(5) as threads:
        waiting = [
            threads.submit(work.apply_async, (number,), tenant="full", **options) for number in range(5)
        ]
        wait_until(lambda: refusals(app) >= 10, 30)
        for number in range(20):
            work.apply_async((number,), tenant="other", expires=1000)  # on Celery's way
        assert depth(app, "other") == 20
        assert not any(each.done() for each in waiting)
        bound(app, 100, "wait")
        ids = [each.result(30).id for each in waiting]
    assert len(set(ids)) == 5
    assert depth(app, "full") == 8


@pytest.mark.parametrize("options", [{}, {"link": ()}], ids=["plain", "on Celery's way"])
def test_a_call_that_waits_for_a_connection_and_for_room_has_one_deadline(
    make_app: MakeApp, options: dict[str, Any]
) -> None:
    app = make_app(dq_buffer=False, dq_breaker_failures=0, broker_pool_limit=1, dq_publish_timeout=6)
    add_task(app)
    for number in range(2):
        call(app, number)
    bound(app, 1, "wait")
    took_s = []

    def wait(number: int) -> None:
        began = time.monotonic()
        with pytest.raises(QueueFull):
            call(app, number, **options)
        took_s.append(time.monotonic() - began)

    with ThreadPoolExecutor(4) as threads:
        [*threads.map(wait, range(4))]
    assert max(took_s) < 6


def test_a_call_with_a_producer_of_its_own_does_not_wait(direct: Any) -> None:
    call(direct, 0)
    bound(direct, 1, "wait")
    with direct.connection_for_write() as connection:
        producer = direct.amqp.Producer(connection)
        with pytest.raises(QueueFull):
            call(direct, 1, producer=producer)  # as beat makes it
    assert refusals(direct) == 1


@pytest.mark.parametrize("first", [False, True], ids=["later calls", "first calls"])
@pytest.mark.parametrize("how", ["refuse", "wait"])
def test_awaited_calls_to_a_full_tenant_block_no_loop_and_no_thread(
    make_app: MakeApp, stored: Stored, how: str, first: bool
) -> None:
    app = make_app(dq_buffer=False, broker_pool_limit=2, dq_publish_timeout=60)
    work: Any = add_task(app)

    async def calls() -> None:
        for number in range(3):
            if first:
                work.apply_async((number,), tenant="full")
            else:
                await work.aapply_async((number,), tenant="full")
        bound(app, 3, how)
        tried = [asyncio.ensure_future(work.aapply_async((number,), tenant="full")) for number in range(50)]
        while refusals(app) < 50:
            await asyncio.sleep(0.01)
        # Neither the connections nor the threads of the loop are in use.
        await asyncio.wait_for(asyncio.gather(*(asyncio.to_thread(int) for _ in range(50))), 30)
        for number in range(20):
            await work.aapply_async((number,), tenant="other")
        if how == "wait":
            assert not any(each.done() for each in tried)
            bound(app, 1000, how)
            results = await asyncio.gather(*tried)
            assert len({each.id for each in results}) == 50
        else:
            for each in tried:
                with pytest.raises(QueueFull, match="max_waiting allows no more"):
                    await each

    asyncio.run(asyncio.wait_for(calls(), 60))
    assert depth(app, "other") == 20
    assert depth(app, "full") == (53 if how == "wait" else 3)
    assert circuit(app) == "closed"


@pytest.mark.parametrize("how", ["discard", "dead_letter"])
def test_a_call_pushes_the_first_messages_out(direct: Any, stored: Stored, how: str) -> None:
    work = direct.tasks["work"]
    ids = [work.apply_async((number,), tenant="full").id for number in range(4)]
    bound(direct, 2, how)
    assert stored.ids("celery") == ids
    last = work.apply_async((4,), tenant="full").id
    assert stored.ids("celery") == [ids[3], last]
    letters = direct.dq.dead_letters["celery"].list()
    assert {each.id for each in letters} == (set(ids[:3]) if how == "dead_letter" else set())
    assert direct.dq.queues["celery"].snapshot().counters.overflowed == 3


# -- kombu's batch


def publish(producer: Any, **calls: str) -> None:
    """Publish by kombu; the names are the task ids, and the values the tenants."""
    for task_id, tenant in calls.items():
        headers = {"id": task_id, "task": "work"}
        message = {"headers": headers, "tenant": tenant, "serializer": "json"}
        producer.publish([[1], {}, {}], routing_key="celery", **message)


def test_a_batch_stores_the_other_calls_and_names_the_refused_ones(direct: Any, stored: Stored) -> None:
    direct.tasks["work"].apply_async(tenant="full")
    bound(direct, 2)
    with direct.producer_or_acquire() as producer:
        producer.maybe_declare(Queue("celery"))
        with pytest.raises(BacklogFull, match="2 calls were not sent") as raised, producer.batch():
            publish(producer, a="full", b="full", c="other", d="full", e="third")
        assert raised.value.task_ids == ("b", "d")
        assert {"a", "c", "e"} < set(stored.ids("celery"))
        assert stored.count("celery") == 4
        # The channel goes on, and no number of a refused call is in its way.
        bound(direct, 4)
        with producer.batch():
            publish(producer, f="other", b="full", d="full")
    assert stored.count("celery") == 7


def test_a_batch_in_which_one_tenant_waits_and_one_is_refused_loses_no_call(
    distant_app: Any, proxy: Proxy, stored: Stored
) -> None:
    work = add_task(distant_app)
    for tenant, how in (("full", "wait"), ("refused", "refuse")):
        work.apply_async(tenant=tenant)
        bound(distant_app, 1, how, tenant)

    def send() -> None:
        with distant_app.connection_for_write() as connection:
            producer = connection.Producer()
            producer.maybe_declare(Queue("celery"))
            with producer.batch():
                publish(producer, a="refused", b="full", c="other")

    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(send)
        wait_until(lambda: refusals(distant_app) >= 4, 30)
        proxy.drop_answers_to, proxy.drops_left = b'"b"', 1
        wait_until(lambda: proxy.dropped, 30)
        bound(distant_app, 2, "wait")
        wait_until(lambda: sent.done(), 30)
        with pytest.raises(BacklogFull) as raised:
            sent.result()
    assert raised.value.task_ids == ("a",)
    assert stored.count("celery") == 4


# -- lost answers and forks


def test_a_refused_call_whose_answer_was_lost_is_stored_once_at_most(
    distant_app: Any, proxy: Proxy, stored: Stored
) -> None:
    work = add_task(distant_app)
    for number in range(3):
        work.apply_async((number,), tenant="full")
    bound(distant_app, 3)
    proxy.drop_answers_to, proxy.drops_left = b"look-for-this", 2
    with pytest.raises(QueueFull):
        work.apply_async(("look-for-this",), tenant="full")
    assert (proxy.dropped, stored.count("celery")) == (2, 3)
    bound(distant_app, 4)
    proxy.drops_left = 2
    work.apply_async(("look-for-this",), tenant="full")
    assert (proxy.dropped, stored.count("celery")) == (4, 4)


def test_a_fork_after_a_refusal_sends_each_call_once(direct: Any, stored: Stored) -> None:
    work = direct.tasks["work"]
    work.apply_async((0,), tenant="full")
    bound(direct, 1)
    with pytest.raises(QueueFull):
        work.apply_async((1,), tenant="full")

    def child() -> None:
        with pytest.raises(QueueFull):
            work.apply_async((2,), tenant="full")
        work.apply_async((3,), tenant="other")

    in_child(child)
    work.apply_async((4,), tenant="other")
    assert stored.count("celery") == 3


# -- buffered calls


@pytest.fixture(params=["memory", "disk"])
def buffered(request: pytest.FixtureRequest, make_app: MakeApp) -> Any:
    folder = {"dq_buffer_folder": ""} if request.param == "memory" else {}
    app = make_app(dq_buffer_linger=0.005, **folder)
    add_task(app)
    return app


def failures(app: Any) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []

    def failed(error: BaseException, message: Any, state: str) -> None:
        assert isinstance(error, QueueFull)
        found.append((message.task_id, state))

    app.dq.buffer.on_error(failed)
    return found


@pytest.mark.logged_error("max_waiting allows no more")
def test_a_buffer_delivers_the_other_tenants_and_reports_each_refused_call_once(
    buffered: Any, stored: Stored, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    work, failed = buffered.tasks["work"], failures(buffered)
    bound(buffered, 2)
    full, others = [], []
    for number in range(6):
        full.append(work.apply_async((number,), tenant="full").id)
        others.append(work.apply_async((number,), tenant=f"t{number % 2}").id)
    buffered.dq.buffer.flush(30)
    assert failed == [(task_id, "rejected") for task_id in full[2:]]
    assert set(stored.ids("celery")) == {*full[:2], *others}
    counters = buffered.dq.buffer.inspect().counters
    assert (counters["rejected"], counters["delivered"]) == (4, 8)
    kept = [*(tmp_path / "spill").rglob("*rejected-*")] if (tmp_path / "spill").exists() else []
    assert len(kept) in (0, 4)
    (line,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert line.__dict__["event"] == "buffer_message_refused"


@pytest.mark.logged_error("max_waiting allows no more")
def test_a_lane_waits_for_room_and_keeps_its_order(
    buffered: Any, stored: Stored, caplog: pytest.LogCaptureFixture
) -> None:
    work, failed = buffered.tasks["work"], failures(buffered)
    bound(buffered, 2, "wait")
    bound(buffered, 1, "refuse", "refused")
    refused = [work.apply_async((number,), tenant="refused").id for number in range(2)]
    ids = [work.apply_async((number,), tenant="full").id for number in range(6)]
    wait_until(lambda: refusals(buffered) > 6, 30)
    # A message that is refused for good does not wait for those that are not.
    assert failed == [(refused[1], "rejected")]
    assert depth(buffered, "full") == 2
    for count in (3, 5, 6):
        bound(buffered, count, "wait")
        wait_until(lambda count=count: depth(buffered, "full") == count, 30)  # type: ignore[misc]
    buffered.dq.buffer.flush(30)
    assert [each for each in stored.ids("celery") if each in ids] == ids
    assert failed == [(refused[1], "rejected")]
    events = [each.__dict__.get("event") for each in caplog.records if each.levelname in ("WARNING", "ERROR")]
    assert events == ["buffer_message_refused", "buffer_lane_deferred"]


@pytest.mark.logged_error("max_waiting allows no more")
def test_a_refused_call_of_a_batch_that_is_halved_is_not_lost(
    make_app: MakeApp, proxy: Proxy, dq_url: str, stored: Stored
) -> None:
    app = make_app(proxy.url(dq_url), dq_buffer_linger=60)
    work, failed = add_task(app), failures(app)
    bound(app, 2)
    ids = [work.apply_async((number,), tenant="full").id for number in range(8)]
    proxy.drop_answers_to, proxy.drops_left = ids[0].encode(), 3
    app.dq.buffer.flush(60)
    assert proxy.dropped == 3
    assert stored.ids("celery") == ids[:2]
    assert [task_id for task_id, _ in failed] == ids[2:]


PRODUCER = """
import sys, time
from tests.producer.test_full_backlogs import add_task
from celery import Celery
import celery_dq
app = Celery("shop", broker=sys.argv[1], set_as_current=False)
app.conf.update(dq_buffer=True, dq_buffer_folder=sys.argv[2], dq_buffer_linger=60)
if sys.argv[5] == "ends":
    app.conf.dq_buffer_linger = 0.05
app.conf.dq_buffer_batch_size = int(sys.argv[3])
celery_dq.setup(app)
work = add_task(app)
for number in range(int(sys.argv[4])):
    print(work.apply_async((number,), tenant=("full", "other")[number % 2]).id, flush=True)
if sys.argv[5] == "ends":
    app.dq.buffer.replay()
app.dq.buffer.flush(0.5 if sys.argv[5] == "stays" else 60)
print("ready", flush=True)
if sys.argv[5] == "stays":
    time.sleep(600)
"""


def test_the_calls_of_a_killed_producer_that_waited_are_sent_by_the_next_one(
    make_app: MakeApp, dq_url: str, stored: Stored, tmp_path: Path
) -> None:
    app = make_app(dq_buffer=False)
    add_task(app)
    bound(app, 3, "wait")
    arguments = [sys.executable, "-W", "ignore", "-c", PRODUCER, dq_url, str(tmp_path / "spill")]
    ids: list[str] = []
    with subprocess.Popen(
        [*arguments, "100", "40", "stays"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        for line in killed.stdout:
            if line == "ready\n":
                break
            ids.append(line.strip())
        wait_until(lambda: refusals(app) > 0, 30)
        killed.send_signal(signal.SIGKILL)
    assert (depth(app, "full"), depth(app, "other")) == (3, 20)
    bound(app, None)
    # Its batches have other borders.
    subprocess.run([*arguments, "7", "0", "ends"], cwd=ROOT, check=True, timeout=60, capture_output=True)
    assert (depth(app, "full"), depth(app, "other")) == (20, 20)
    order = stored.ids("celery")
    assert [each for each in order if each in ids[::2]] == ids[::2]
