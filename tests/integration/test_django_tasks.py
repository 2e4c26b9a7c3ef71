"""Django's tasks on celery-dq: a producer and a real worker, each a process of the project ``bank``."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from celery_dq.contrib.django.task_backend import celery_priority
from tests.preloaded import PythonFork, run_python

PROJECT = Path(__file__).parent / "django_tasks_shop"
ROOT = Path(__file__).parents[2]

Script = Callable[..., Any]
BEGIN = """
import django, json, time
django.setup()
from datetime import timedelta
from django.utils import timezone
from bank.celery import app
from payments.tasks import fail, pay, report, wait_for
def finished(result):
    end = time.monotonic() + 30
    while not result.is_finished:
        assert time.monotonic() < end, result
        time.sleep(0.02)
        result.refresh()
    return result
"""


@pytest.fixture
def environment(redis_url: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(PROJECT), str(ROOT)]),
        "DJANGO_SETTINGS_MODULE": "bank.settings",
        "BANK_BROKER": redis_url.replace("redis://", "dq-redis://", 1),
        "BANK_RESULTS": redis_url,
    }


@pytest.fixture
def script(environment: dict[str, str]) -> Script:
    """A function that runs a script in the project, and returns the JSON value that it prints."""

    def script(text: str, **more: str) -> Any:
        done = run_python("-c", BEGIN + text, environment={**environment, **more})
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return script


@pytest.fixture
def worker(environment: dict[str, str]) -> Iterator[None]:
    with worker_of(environment):
        yield


@contextmanager
def worker_of(environment: dict[str, str]) -> Iterator[None]:
    words = ["-m", "celery", "-A", "bank", "worker", "-P", "solo", "-Q", "push,reports", "-l", "WARNING"]
    process = PythonFork([*words, "--without-mingle"], environment, Path(os.devnull), folder=PROJECT)
    yield
    process.send_signal(signal.SIGTERM)
    process.wait(30)


def test_a_task_waits_in_its_queue_with_tenant_and_priority(script: Script) -> None:
    found = script(
        "now = pay.enqueue('acme', amount=7)\n"
        "later = pay.using(run_after=timezone.now() + timedelta(hours=1), priority=-100).enqueue('zeta')\n"
        "other = report.enqueue('daily')\n"
        "found = [app.dq.find(each.id)[0] for each in (now, later, other)]\n"
        "waits = pay.get_result(now.id)\n"
        "print(json.dumps([[m.queue, m.state, m.tenant, m.priority, m.task] for m in found]\n"
        "    + [[now.status, now.args, now.kwargs, waits.status, waits.task == pay]]))"
    )
    assert found == [
        ["push", "waiting", "acme", 7, "payments.tasks.pay"],
        ["push", "delayed", "zeta", 0, "payments.tasks.pay"],
        ["reports", "waiting", "", 4, "payments.tasks.report"],
        ["READY", ["acme"], {"amount": 7}, "READY", True],
    ]


def test_a_worker_runs_tasks_and_their_results_are_read(script: Script, worker: None) -> None:
    paid, context, failed = script(
        "one, two = pay.enqueue('acme', amount=7), report.enqueue('daily')\n"
        "three = fail.enqueue('no account')\n"
        "for each in (one, two, three): finished(each)\n"
        "error = three.errors[0]\n"
        "fresh = pay.get_result(one.id)\n"
        "print(json.dumps([\n"
        "    [one.status, one.return_value, fresh.args, fresh.kwargs, one.attempts, str(one.finished_at)],\n"
        "    [two.return_value, two.id],\n"
        "    [three.status, error.exception_class_path, 'no account' in error.traceback],\n"
        "]))"
    )
    assert paid[:5] == ["SUCCESSFUL", {"merchant": "acme", "amount": 7}, ["acme"], {"amount": 7}, 1]
    assert paid[5].endswith("+00:00")
    assert context[0] == ["daily", 1, context[1]]
    assert failed == ["FAILED", "builtins.LookupError", True]


TIMES = (
    "def times(result):\n"
    "    return [each and each.timestamp() for each in (result.enqueued_at, result.started_at,\n"
    "        result.last_attempted_at, result.finished_at)]\n"
)


def test_a_result_keeps_its_times_through_refresh(script: Script, environment: dict[str, str]) -> None:
    """Before it is claimed, after a success, after a failure, and read by its id."""
    waiting = script(
        TIMES + "one, two = pay.enqueue('acme', amount=7), fail.enqueue('no account')\n"
        "before = times(one), times(two)\n"
        "one.refresh(), two.refresh()\n"
        "print(json.dumps([before, [times(one), times(two)], [one.id, two.id]]))"
    )
    assert waiting[0] == waiting[1]
    with worker_of(environment):
        ended = script(
            TIMES + f"found = [each.get_result(id) for each, id in zip((pay, fail), {waiting[2]!r})]\n"
            "for each in found: finished(each)\n"
            "print(json.dumps([times(each) for each in found]))"
        )
    for (enqueued, *_), (again, started, attempted, finished) in zip(waiting[0], ended, strict=True):
        assert again == enqueued <= started == attempted <= finished


def test_a_result_is_read_although_its_task_ends_meanwhile(script: Script, worker: None) -> None:
    """The task ends after the result backend had no result, and before the broker has no message.

    The result is stored before the message is acknowledged, so the test waits for the latter, too.
    """
    value, again = script(
        "one = pay.enqueue('acme', amount=7)\n"
        "finished(one)\n"
        "end = time.monotonic() + 30\n"
        "while app.dq.find(one.id): assert time.monotonic() < end\n"
        "read, answers = app.backend.get_task_meta, [{'status': 'PENDING'}]\n"
        "app.backend.get_task_meta = lambda key: answers.pop() if answers else read(key)\n"
        "print(json.dumps([one.return_value, pay.get_result(one.id).return_value]))"
    )
    assert value == again is not None


@pytest.mark.parametrize("state", ["", "PROGRESS"])
def test_a_task_that_runs_has_a_result_from_its_start(
    script: Script, worker: None, tmp_path: Path, state: str
) -> None:
    ended, begun = tmp_path / "ended", state or "STARTED"
    status, again, last = script(
        f"one = wait_for.enqueue({str(ended)!r}, {state!r})\n"
        "end = time.monotonic() + 30\n"
        f"while app.backend.get_task_meta(one.id)['status'] != {begun!r}: assert time.monotonic() < end\n"
        "one.refresh()\n"
        "seen = [one.status, wait_for.get_result(one.id).status]\n"
        f"open({str(ended)!r}, 'w').close()\n"
        "print(json.dumps([*seen, finished(one).status]))"
    )
    assert [status, again, last] == ["RUNNING", "RUNNING", "SUCCESSFUL"]


def test_unknown_results_and_results_without_names_are_refused(script: Script) -> None:
    unknown = script(
        "try: pay.get_result('nowhere')\nexcept Exception as exc: print(json.dumps([type(exc).__name__]))"
    )
    assert unknown == ["TaskResultDoesNotExist"]
    text = (
        "from django.core.checks import run_checks\n"
        "sent = pay.enqueue('acme')\n"
        "try: pay.get_result(sent.id)\n"
        "except NotImplementedError as exc: print(json.dumps(str(exc)))"
    )
    for more in ({"BANK_RESULTS": ""}, {"BANK_EXTENDED": "0"}):
        assert "CELERY_RESULT_EXTENDED" in script(text, **more)


def test_a_call_with_wrong_arguments_or_a_wrong_queue_is_refused(script: Script) -> None:
    found = script(
        "errors = []\n"
        "calls = lambda: pay.enqueue(), lambda: pay.enqueue('a', 1, 2), lambda: pay.using(queue_name='x')\n"
        "for call in calls:\n"
        "    try: call()\n"
        "    except Exception as exc: errors.append(type(exc).__name__)\n"
        "print(json.dumps([errors, app.dq.queues['push'].depth]))"
    )
    assert found[0][:2] == ["TypeError", "TypeError"]
    assert found[0][2].startswith("InvalidTask")
    assert found[1] == 0


def test_a_task_is_registered_once_however_often_it_is_called(script: Script) -> None:
    before, after = script(
        "import warnings\n"
        "from celery import _state\n"
        "warnings.simplefilter('error')\n"
        "app.finalize()\n"
        "before = len(_state._on_app_finalizers)\n"
        "for amount in range(3):\n"
        "    pay.enqueue('acme', amount=amount)\n"
        "    pay.using(priority=amount, queue_name='reports').enqueue('acme')\n"
        "print(json.dumps([before, len(_state._on_app_finalizers)]))"
    )
    assert before == after


@pytest.mark.parametrize(("priority", "ours"), [(-100, 0), (-1, 4), (0, 4), (1, 5), (50, 7), (100, 9)])
def test_priorities_keep_their_order(priority: int, ours: int) -> None:
    assert celery_priority(priority) == ours


def test_quotas_of_a_model_are_copied_after_the_commit_and_their_drift_is_found(script: Script) -> None:
    rates, rolled_back, drift, mended = script(
        "from django.core.management import call_command\n"
        "from django.db import transaction\n"
        "from payments.models import Contract, drift\n"
        "call_command('migrate', run_syncdb=True, verbosity=0)\n"
        "live = lambda: {name: each.rate for name, each in app.dq.quotas.list('push').items()}\n"
        "with transaction.atomic():\n"
        "    Contract.objects.create(merchant='acme', rate='5/s')\n"
        "    gone = Contract.objects.create(merchant='zeta', rate='6/s')\n"
        "    inside = live()\n"
        "rates = [inside, live()]\n"
        "try:\n"
        "    with transaction.atomic():\n"
        "        gone.delete()\n"
        "        raise KeyError\n"
        "except KeyError: pass\n"
        "rolled_back = sorted(live())\n"
        "Contract.objects.get(merchant='zeta').delete()\n"
        "Contract.objects.update(rate='7/s')\n"
        "found = drift(Contract.objects.all())\n"
        "app.dq.quotas.make(found)\n"
        "print(json.dumps([rates, rolled_back, [str(each) for each in found], live()]))"
    )
    assert rates == [{}, {"acme": 5, "zeta": 6}]
    assert rolled_back == ["acme", "zeta"]
    assert [line.split(":")[0] for line in drift] == ["~ push  acme"]
    assert mended == {"acme": 7}
