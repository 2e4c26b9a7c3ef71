"""A worker on a broker without tenants logs at its start which settings are ignored."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker

import celery_dq
from celery_dq.options import resolve
from celery_dq.worker.start_checks import MOST_NAMES, unenforced
from tests.apps import without_shared_tasks

LOGGER = "celery_dq.worker.start_checks"


def make_app(url: str, **conf: Any) -> Any:
    app = without_shared_tasks(Celery("shop", broker=url, set_as_current=False))
    celery_dq.setup(app)
    app.conf.update(broker_connection_retry_on_startup=True, worker_hijack_root_logger=False, **conf)
    return app


@pytest.mark.parametrize("scheme", ["redis", "dq-redis"])
def test_tenants_and_quotas_that_are_ignored(
    redis_url: str, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = redis_url.replace("redis", scheme, 1)
    queues = {"push": {"rate": 5}}
    app = make_app(url, dq_queues=queues, dq_default_quota={"concurrency": 4}, dq_inherit_tenant=True)
    app.task(shared=False, name="notify", tenant="{merchant}")(notify)
    with (
        caplog.at_level(logging.WARNING, LOGGER),
        start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=20),
    ):
        pass
    text = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    expected = (
        "The broker redis:// has no tenants: the tenant of task 'notify' is ignored, the quota of "
        "queue 'push' in dq_queues is not enforced, dq_default_quota is not enforced, dq_inherit_tenant is "
        "ignored. Set broker_url to dq-redis://… to enforce them."
    )
    assert text == ([expected] if scheme == "redis" else [])


@pytest.mark.parametrize(
    ("number", "end"),
    [(1, "task 'a0'"), (MOST_NAMES, f"'a{MOST_NAMES - 1}'"), (MOST_NAMES + 2, " and 2 more")],
)
def test_a_long_list_of_ignored_tenants_is_cut(number: int, end: str) -> None:
    tasks = {f"a{each}": SimpleNamespace(tenant="{merchant}") for each in range(number)}
    text = unenforced(resolve({}), tasks)
    assert text.startswith("the tenant of task")
    assert text.endswith(f"{end} is ignored")
    assert text.count("'a") == min(number, MOST_NAMES)


@pytest.mark.parametrize("scheme", ["dq-redis", "redis"])
def test_a_worker_logs_the_wrong_options_of_its_tasks(
    redis_url: str, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(redis_url.replace("redis", scheme, 1))
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "argument": ({"tenant": "{merchnt}"}, "merchnt"),
        "arity": ({"tenant": lambda args: "a"}, "(args, kwargs)"),
        "key": ({"dedup": {"key": "{nope}"}}, "nope"),
        "typo": ({"tenat": "{merchant}"}, "did you mean 'tenant'?"),
    }
    for name, (options, _) in wrong.items():
        app.task(shared=False, name=name, **options)(notify)
    app.task(shared=False, name="right", tenant="{merchant}", dedup=True)(notify)
    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=20, loglevel="WARNING"):
        pass
    found = [
        each.getMessage() for each in caplog.records if getattr(each, "event", "") == "task_option_wrong"
    ]
    assert len(found) == len(wrong)
    for name, (_, words) in wrong.items():
        assert any(name in each and words in each for each in found)


def test_an_app_that_uses_neither_learns_nothing(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(redis_url)
    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=20):
        pass
    assert [record for record in caplog.records if record.name == LOGGER] == []


def notify(merchant: str) -> None:
    """A task."""
