"""A small Django project whose settings have ``CELERY_DQ_*``; each test runs it in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from celery_dq.testing.servers import RedisServer
from tests.preloaded import run_python

PROJECT = Path(__file__).parent / "django_shop"
ROOT = Path(__file__).parents[2]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(broker_url: str) -> Run:
    """A function that runs Python in the project. Its keywords are environment variables."""

    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "shop.settings",
            "PYTHONPATH": os.pathsep.join([str(PROJECT), str(ROOT)]),
            "SHOP_BROKER": broker_url,
            **environment,
        }
        return run_python(*words, environment=variables, folder=PROJECT)

    return run


def script(run: Run, text: str, **environment: str) -> str:
    """Run a script after ``django.setup()``; return its output."""
    done = run("-c", f"import django; django.setup()\n{text}", **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_installed_app_sets_the_projects_app_up(run: Run) -> None:
    text = script(
        run,
        "from shop.celery import app\n"
        "from orders.tasks import notify\n"
        "notify.delay(42)\n"
        "print(app.dq.options.environment, app.dq.options.queue('push').quota.rate)\n"
        "print(app.dq.queues['push'].depth, app.dq.queues['push'].peek()[0].tenant)\n",
    )
    assert text.split() == ["sandbox", "50.0", "1", "42"]


@pytest.mark.parametrize("name", ["shop.celery:app", "shop.celery"])
def test_the_app_may_be_named(run: Run, name: str) -> None:
    text = "from shop.celery import app; print('dq' in vars(app), app.dq.options.environment)"
    assert script(run, text, SHOP_SET=f"CELERY_DQ_APP={name}") == "True sandbox"


def test_the_view_serves_the_metrics_to_readers_only(run: Run) -> None:
    text = script(
        run,
        "from django.test import RequestFactory\n"
        "from celery_dq.contrib.django.views import metrics\n"
        "from orders.tasks import notify\n"
        "notify.delay(42)\n"
        "requests = RequestFactory()\n"
        "answer = metrics(requests.get('/metrics'))\n"
        "print(answer.status_code, answer['Content-Type'], metrics(requests.post('/metrics')).status_code)\n"
        "print(answer.content.decode())\n",
    ).splitlines()
    assert text[0].startswith("200 text/plain; version=")
    assert text[0].endswith(" 405")
    assert "celery_dq_up 1.0" in text
    assert 'celery_queue_length{queue_name="push"} 1.0' in text


def test_an_app_that_is_not_there_is_an_error_that_names_the_setting(run: Run) -> None:
    for wrong in ("nowhere.celery:app", "shop.celery:nothing", "shop.settings:SECRET_KEY"):
        done = run("-c", "import django; django.setup()", SHOP_SET=f"CELERY_DQ_APP={wrong}")
        assert done.returncode != 0
        last = done.stderr.strip().splitlines()[-1]
        assert "ImproperlyConfigured" in last
        assert "CELERY_DQ_APP" in last


def check(run: Run, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "django", "check", *options, **environment)


def test_the_system_check_is_silent_when_all_is_well(run: Run) -> None:
    done = check(run, "--tag", "celery_dq")
    assert (done.returncode, "no issues" in done.stdout) == (0, True), done.stderr


def test_the_system_check_finds_wrong_settings_schemes_and_templates(run: Run) -> None:
    wrong = check(run, SHOP_SET="CELERY_DQ_LEESE=5")
    assert "celery_dq.E001" in wrong.stderr
    assert "did you mean 'dq_lease'" in wrong.stderr
    assert "celery_dq.W002" in check(run, SHOP_BROKER="redis://localhost").stderr
    template = check(run, SHOP_TENANT="{shop}")
    assert "celery_dq.E003" in template.stderr
    assert "'{shop}'" in template.stderr
    assert "E011" not in check(run, SHOP_BROKER="dq-redis://127.0.0.1:1/0").stderr


def test_the_system_check_finds_an_outbox_in_a_database_that_the_project_does_not_have(run: Run) -> None:
    known = check(run, SHOP_SET="CELERY_DQ_OUTBOX=default")
    assert known.returncode == 0, known.stderr
    wrong = check(run, SHOP_SET="CELERY_DQ_OUTBOX=default,bank")
    assert wrong.returncode == 1
    assert "celery_dq.E041" in wrong.stderr
    assert "names 'bank', and DATABASES has no such alias: it has 'default'." in wrong.stderr
    assert "Traceback" not in wrong.stderr
    both = check(run, SHOP_SET="CELERY_DQ_OUTBOX=bank CELERY_DQ_LEESE=5").stderr
    assert "celery_dq.E001" in both


def test_the_deployment_check_looks_at_the_server(run: Run) -> None:
    assert (
        "celery_dq.E011"
        in check(run, "--deploy", "--tag", "celery_dq", SHOP_BROKER="dq-redis://127.0.0.1:1/0").stderr
    )
    with RedisServer(config={"maxmemory-policy": "allkeys-lru", "maxmemory": "100mb"}) as evicting:
        found = check(
            run, "--deploy", "--tag", "celery_dq", SHOP_BROKER=evicting.url(scheme="dq-redis")
        ).stderr
    assert "celery_dq.E010" in found
    assert "allkeys-lru" in found


def test_the_celery_command_uses_the_projects_namespace(run: Run) -> None:
    script(run, "from orders.tasks import notify; notify.delay(1)")
    listed = run("-m", "celery", "-A", "shop", "dq", "queues", "--json")
    assert listed.returncode == 0, listed.stderr
    assert json.loads(listed.stdout)[0]["waiting"] == 1
    # This is Celery's own command, in which no Django app is ready.
    purged = run("-m", "celery", "-A", "shop", "purge", "-f")
    assert "Purged 1 message" in purged.stdout + purged.stderr


@pytest.mark.parametrize(("kind", "command"), [("inspect", "leaders"), ("control", "resign")])
def test_the_celery_command_knows_the_commands_of_leaders(run: Run, kind: str, command: str) -> None:
    listed = run("-m", "celery", "-A", "shop", kind, "--list")
    assert listed.returncode == 0, listed.stderr
    assert f"  {command} " in listed.stdout
    asked = run("-m", "celery", "-A", "shop", kind, "--timeout", "0.1", command, "push")
    assert "not recognized" not in asked.stdout + asked.stderr
