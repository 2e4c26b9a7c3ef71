"""The fixtures for users' tests, in a separate pytest as in a user's project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from celery_dq.testing.processes import dead_port
from tests.preloaded import run_python

ROOT = Path(__file__).parents[2]
DJANGO_SHOP = Path(__file__).with_name("django_shop")

SHOP = """
from celery import Celery, shared_task

app = Celery("shop", broker="{scheme}://127.0.0.1:{port}/0", backend="redis://127.0.0.1:{port}/1")
app.conf.update(
    task_default_queue="push",
    dq_buffer_folder="/nowhere/to/be/written",
    dq_election="zookeeper://127.0.0.1:{port}",
    dq_election_options={{"auth": [("digest", "shop:secret")]}},
    dq_allocation=True,
    dq_queues={{"push": {{"max_deliveries": 2, "allocated": True}}}},
    dq_confirm_replicas=1,
    broker_transport="redis",
    broker_user="shop",
    broker_password="secret",
    redis_username="shop",
    redis_password="secret",
    broker_transport_options={{"master_name": "elsewhere"}},
    broker_use_ssl={{"ca_certs": "/nowhere"}},
    task_always_eager=True,
)


@shared_task(tenant="{{merchant}}")
def notify(merchant, order=0):
    return f"{{merchant}}, order {{order}}"


@shared_task(dedup={{"key": "{{sku}}"}})
def refresh(sku):
    return sku
"""

CONFTEST = """
import pytest

pytest_plugins = ["celery_dq.testing.pytest"]


@pytest.fixture
def dq_app():
    from shop import app

    return app
"""

TESTS = """
import gc

import pytest
from kombu import pools
from shop import app, notify, refresh

NAMES = ("broker_url", "broker_use_ssl", "broker_transport_options", "task_always_eager")
NAMES += ("dq_election", "dq_allocation", "dq_queues")
SETTINGS = {name: getattr(app.conf, name) for name in NAMES}
TWICE = pytest.mark.parametrize("time", [1, 2])


@TWICE
def test_a_worker_runs_the_calls(dq_worker, time):
    assert notify.delay("bakery", time).get(timeout=20) == f"bakery, order {time}"
    assert notify.apply_async(("bakery", time), buffered=True).get(timeout=20) == f"bakery, order {time}"
    assert refresh.delay("bread").get(timeout=20) == "bread"


@TWICE
def test_the_broker_is_empty_and_keeps_the_calls(dq_broker, time):
    queue = dq_broker.dq.queues["push"]
    assert queue.depth == 0
    assert dq_broker.dq.options.queue("push").max_deliveries == 2
    for _ in range(3):
        notify.apply_async(("bakery",), buffered=True)
    assert dq_broker.dq.buffer.flush(20) == 0
    first, second = refresh.delay("bread"), refresh.delay("bread")
    assert second.id == first.id
    assert sorted(message.tenant for message in queue.peek()) == ["", "bakery", "bakery", "bakery"]


@TWICE
def test_nothing_is_left_over(dq_redis, time):
    assert {name: getattr(app.conf, name) for name in NAMES} == SETTINGS
    assert (len(pools.connections), len(pools.producers)) == (0, 0)
    gc.collect()  # what the thread of a worker had is garbage
    # The connection that asks is the only one.
    assert len(dq_redis.ask("CLIENT", "LIST").split("\\n")) == 2, dq_redis.ask("CLIENT", "LIST")
"""

DJANGO_CONFTEST = """
import django

pytest_plugins = ["celery_dq.testing.pytest"]
django.setup()
"""

DJANGO_TESTS = """
import gc

import pytest
from orders.tasks import notify


@pytest.fixture
def dq_worker_options():
    return {"queues": "push", "pool": "threads", "concurrency": 2}


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_shared_task(dq_worker, order):
    assert notify.delay(7, order).get(timeout=20) is None


@pytest.mark.parametrize("order", [1, 2])
def test_quotas_of_the_settings_hold(dq_broker, order):
    notify.delay(7, order)
    assert [message.tenant for message in dq_broker.dq.queues["push"].peek()] == ["7"]
    assert dq_broker.dq.options.environment == "sandbox"
"""


def run_pytest(folder: Path, conftest: str, tests: str, *paths: Path, **environment: str) -> str:
    """Run the tests of a project, which must pass; return the output of pytest."""
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_shop.py").write_text(tests)
    search = os.pathsep.join(map(str, (ROOT, folder, *paths)))
    done = run_python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "test_shop.py"),
        environment={**os.environ, "PYTHONPATH": search, **environment},
        folder=folder,
        timeout_s=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("scheme", ["dq-redis", "redis"])
def test_each_test_has_a_broker_of_its_own(tmp_path: Path, scheme: str) -> None:
    with dead_port() as port:
        (tmp_path / "shop.py").write_text(SHOP.format(scheme=scheme, port=port))
        dead = f"redis://127.0.0.1:{port}/5"
        printed = run_pytest(tmp_path, CONFTEST, TESTS, CELERY_RESULT_BACKEND=dead)
    assert "6 passed" in printed


def test_in_a_django_project_with_shared_tasks(tmp_path: Path) -> None:
    with dead_port() as port:
        settings = {
            "DJANGO_SETTINGS_MODULE": "shop.settings",
            "SHOP_BROKER": f"dq-redis://127.0.0.1:{port}/0",
        }
        printed = run_pytest(tmp_path, DJANGO_CONFTEST, DJANGO_TESTS, DJANGO_SHOP, **settings)
    assert "5 passed" in printed
