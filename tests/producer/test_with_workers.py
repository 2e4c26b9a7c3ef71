"""Buffered calls, run by real workers; calls of Django after a commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import chain

from tests.log_watch import WATCH
from tests.preloaded import PythonFork
from tests.producer.conftest import MakeApp, Stored

ROOT = Path(__file__).parents[2]


def add(a: int, b: int) -> int:
    raise AssertionError("the worker has a task of this name")


@contextmanager
def worker(log: Path, conf: dict[str, Any], *, stock: bool = False, pool: str = "solo") -> Iterator[None]:
    environment = {**os.environ, "SHOP_CONF": json.dumps(conf), "PYTHONPATH": str(ROOT)}
    if stock:
        environment["SHOP_IS_STOCK"] = "1"
    command = ["-m", "celery", "-A", "tests.producer.shop", "worker", "-P", pool, "-l", "WARNING", "-c", "1"]
    WATCH.watch(log)
    process = PythonFork([*command, "--without-gossip", "--without-mingle"], environment, log)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


@pytest.mark.parametrize("stock", [False, True])
def test_a_worker_runs_buffered_calls(
    make_app: MakeApp, dq_url: str, redis_url: str, tmp_path: Path, stock: bool
) -> None:
    url = redis_url if stock else dq_url
    app = make_app(url, result_backend=redis_url)
    task: Any = app.task(name="add", shared=False)(add)
    with worker(tmp_path / "log", {"broker_url": url, "result_backend": redis_url}, stock=stock):
        results = [task.delay(number, 1) for number in range(5)]
        assert [result.get(timeout=60) for result in results] == [1, 2, 3, 4, 5]
        assert chain(task.s(1, 2), task.s(3)).apply_async().get(timeout=60) == 6
        assert task.apply_async((1, 2), link=task.s(10)).get(timeout=60) == 3
    assert app.dq.buffer.inspect().counters["delivered"] == 7


def test_publishes_of_a_task_are_not_buffered_unless_asked_for(
    make_app: MakeApp, dq_url: str, redis_url: str, tmp_path: Path
) -> None:
    app = make_app(result_backend=redis_url)
    conf = {
        "broker_url": dq_url,
        "result_backend": redis_url,
        "dq_buffer": True,
        "dq_buffer_folder": str(tmp_path / "of-worker"),
    }
    for expected in (0, 2):
        with worker(tmp_path / "log", {**conf, "dq_buffer_in_workers": bool(expected)}):
            assert app.send_task("publish").get(timeout=60) == {"buffered": expected}


def test_a_worker_buffers_the_next_task_of_a_chain(
    make_app: MakeApp, dq_url: str, redis_url: str, tmp_path: Path
) -> None:
    app = make_app(result_backend=redis_url)
    task: Any = app.task(name="add", shared=False)(add)
    conf = {
        "broker_url": dq_url,
        "result_backend": redis_url,
        "dq_buffer": True,
        "dq_buffer_in_workers": True,
        "dq_buffer_folder": str(tmp_path / "of-worker"),
    }
    with worker(tmp_path / "log", conf):
        assert chain(task.s(1, 2), task.s(3)).apply_async().get(timeout=60) == 6


def test_the_end_of_a_pool_child_sends_the_calls_of_its_tasks(
    make_app: MakeApp, dq_url: str, redis_url: str, tmp_path: Path, stored: Stored
) -> None:
    app = make_app(result_backend=redis_url)
    conf = {
        "broker_url": dq_url,
        "result_backend": redis_url,
        "dq_buffer_folder": "",
        "dq_buffer_linger": "60s",
    }
    with worker(tmp_path / "log", conf, pool="prefork"):
        app.send_task("publish_later").get(timeout=60)
        assert stored.count("later") == 0
    assert stored.count("later") == 1


def test_in_django_a_call_after_the_commit_is_buffered(dq_url: str, tmp_path: Path, stored: Stored) -> None:
    program = f"""
        import django
        from django.conf import settings
        settings.configure(
            DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}}},
            INSTALLED_APPS=[],
            CELERY_BROKER_URL={dq_url!r},
            CELERY_DQ_BUFFER=True,
            CELERY_DQ_BUFFER_FOLDER={str(tmp_path / "spill")!r},
        )
        django.setup()
        from django.db import transaction
        from celery import Celery
        import celery_dq
        app = Celery("shop")
        app.config_from_object("django.conf:settings", namespace="CELERY")
        celery_dq.setup(app)

        @app.task(name="job")
        def job(number): ...

        from celery.contrib.django.task import DjangoTask
        late = app.task(name="late", base=DjangoTask)(job.run)
        accepted = lambda: app.dq.buffer.inspect().counters.get("accepted", 0)
        with transaction.atomic():
            transaction.on_commit(lambda: job.delay(1))
            late.delay_on_commit(2)
            print(accepted())
        print(accepted())
        try:
            with transaction.atomic():
                late.delay_on_commit(3)
                raise KeyError
        except KeyError:
            print(accepted())
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "shop", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["0", "2", "2"], done.stderr
    assert stored.count("celery") == 2
