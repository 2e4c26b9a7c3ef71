"""The tenants of the tasks that tasks of real workers call, with ``dq_inherit_tenant``."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from celery import chord

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.broker.calling_tasks import NAME, TENANTS, WAYS, add_tasks
from tests.brokers import DQ
from tests.conformance.shop import Witness
from tests.workers import WorkerProcess, make_app

_serial = count()


class CallingApp:
    """An app that publishes, with the witness of its tasks."""

    def __init__(self, server: RedisServer, **conf: Any) -> None:
        self.queue = f"calling-{next(_serial)}"
        self.conf: dict[str, Any] = {
            "broker_url": DQ.url(server.port, 1),
            "result_backend": server.url(2),
            "witness_port": server.port,
            "task_default_queue": self.queue,
            "dq_inherit_tenant": True,
            "dq_buffer_folder": "",
            "task_routes": {"routed": {"tenant": "r"}},
            **conf,
        }
        self.app = make_app(NAME, DQ, self.conf)
        add_tasks(self.app, server.port)
        self.witness = Witness(server.port)

    def worker(self, pool: str = "threads", concurrency: int = 4, **options: Any) -> WorkerProcess:
        return WorkerProcess(
            "tests.broker.calling_tasks",
            broker=DQ,
            conf=self.conf,
            pool=pool,
            concurrency=concurrency,
            preloaded=True,
            **options,
        )

    def call(self, way: str, tenant: str = "a") -> None:
        self.app.send_task("call", (way,), tenant=tenant)

    def child(self, label: str) -> Any:
        return self.app.signature("child", (label,), immutable=True)

    def reports(self, way: str) -> list[str]:
        return self.witness.reports(f"{self.queue} {way}")

    def release(self, way: str, amount: int = 1) -> None:
        self.witness.release(f"{self.queue} {way}", amount)

    def ran(self, way: str, tenants: dict[str, str]) -> None:
        """Wait until the tasks with these labels have run, and compare their tenants."""
        wait_until(
            lambda: len(self.reports(way)) >= len(tenants),
            30,
            what=lambda: f"{len(tenants)} reports: {self.reports(way)}",
        )
        assert sorted(self.reports(way)) == sorted(f"{label}: {each!r}" for label, each in tenants.items())

    def close(self) -> None:
        self.app.close()
        self.witness.close()


Open = Callable[..., CallingApp]


@pytest.fixture
def calling_on(redis_server: RedisServer) -> Iterator[Open]:
    """Return a function that makes an app with these settings."""
    with ExitStack() as stack:
        yield lambda **conf: stack.enter_context(closing(CallingApp(redis_server, **conf)))


@pytest.fixture(scope="module")
def calling(redis_server: RedisServer) -> Iterator[CallingApp]:
    """An app with a worker for all tests of this file that need no other."""
    calling = CallingApp(redis_server)
    with calling.worker():
        yield calling
    calling.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_called_task_has_the_tenant_of_its_caller_unless_the_call_names_another(
    calling: CallingApp, way: str
) -> None:
    calling.call(way)
    calling.ran(way, TENANTS[way])


def test_a_canvas_may_be_called_by_tasks_of_several_tenants(calling_on: Open) -> None:
    calling = calling_on()
    with calling.worker():
        calling.call("canvas", "a")
        calling.ran("canvas", TENANTS["canvas"])
        calling.call("canvas", "b")
        wait_until(lambda: len(calling.reports("canvas")) == 10)
        assert sorted(calling.reports("canvas")[5:]) == [f"{number}: 'b'" for number in range(5)]


def test_a_chord_that_no_task_calls_gives_its_body_no_tenant_of_a_header(calling: CallingApp) -> None:
    header = [calling.child("outside:header").set(tenant="a")] * 2
    bodies = {tenant: calling.child(f"outside:{tenant or 'no'} tenant") for tenant in ("", "b", "c")}
    chord(header)(bodies[""])
    chord(header)(bodies["b"].set(tenant="b"))
    chord([calling.child("outside:header")] * 2).apply_async(kwargs={"body": bodies["c"]}, tenant="c")
    wait_until(lambda: len(calling.reports("outside")) == 9)
    assert {*calling.reports("outside")} == {
        "header: 'a'",
        "header: 'c'",
        "no tenant: ''",
        "b tenant: 'b'",
        "c tenant: 'c'",
    }


@pytest.mark.parametrize("pool", ["prefork", "gevent", "eventlet"])
def test_tasks_that_run_at_once_give_their_calls_their_own_tenants(calling_on: Open, pool: str) -> None:
    calling = calling_on()
    with calling.worker(pool, 3):
        for tenant in "abc":
            calling.app.send_task("call_later", ("later",), tenant=tenant)
        began = {"began by a": "a", "began by b": "b", "began by c": "c"}
        calling.ran("later", began)
        calling.release("later", 3)
        calling.ran("later", {**began, **{f"call of {tenant}": tenant for tenant in "abc"}})
        # A thread of a task, in these pools also a greenlet of its own, runs no task.
        calling.call("thread")
        calling.ran("thread", TENANTS["thread"])


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
@pytest.mark.logged_error("Hard time limit")
def test_an_errback_of_a_task_beyond_its_time_limit_has_the_tenant_of_the_task(
    calling_on: Open, pool: str
) -> None:
    calling = calling_on()
    with calling.worker(pool):
        errback = calling.child("limit:errback")
        calling.app.send_task("call_later", ("limit",), tenant="a", time_limit=1, link_error=errback)
        wait_until(lambda: "errback: 'a'" in calling.reports("limit"))


@pytest.mark.logged_error("WorkerLostError")
def test_an_errback_of_a_task_that_has_lost_its_process_has_the_tenant_of_the_task(calling_on: Open) -> None:
    calling = calling_on()
    with calling.worker("prefork") as worker:
        errback = calling.child("lost:errback")
        calling.app.send_task("call_later", ("lost",), tenant="a", link_error=errback)
        calling.ran("lost", {"began by a": "a"})
        for child in worker.children():
            child.kill()
        calling.ran("lost", {"began by a": "a", "errback": "a"})


@pytest.mark.logged_error("was dead-lettered")
def test_an_errback_of_a_dead_letter_has_the_tenant_of_the_task(calling_on: Open) -> None:
    calling = calling_on(dq_max_deliveries=1, dq_lease=1.0, task_acks_late=True)
    with calling.worker("prefork", 1) as worker:
        errback = calling.child("dead:errback")
        calling.app.send_task("call_later", ("dead",), tenant="a", link_error=errback)
        calling.ran("dead", {"began by a": "a"})
        worker.stop(signal.SIGKILL)
    with calling.worker():
        calling.ran("dead", {"began by a": "a", "errback": "a"})


def test_a_body_that_a_poll_calls_has_the_tenant_of_the_caller(calling_on: Open, tmp_path: Path) -> None:
    calling = calling_on(result_backend=f"file://{tmp_path}")
    with calling.worker() as worker:
        calling.call("chord")
        calling.ran("chord", TENANTS["chord"])
        worker.wait_for_log("celery.chord_unlock")


def test_a_follower_gives_its_callback_its_own_tenant(calling_on: Open) -> None:
    calling = calling_on()
    with calling.worker():
        for label in ("1", "2"):
            link = calling.child(f"follow:{label}")
            calling.app.send_task("call_later", ("follow",), tenant="a", dedup={"waiting": 0}, link=link)
        calling.ran("follow", {"began by a": "a"})
        calling.release("follow")
        calling.ran("follow", {"began by a": "a", "call of a": "a", "1": "a", "2": "a"})
