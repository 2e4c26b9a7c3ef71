"""The rows of an outbox, as commands, metrics and the dashboard show them."""

from __future__ import annotations

from typing import Any

from tests.outbox.conftest import MakeShop
from tests.outbox.outbox_shop import OutboxShop
from tests.preloaded import run_python

ROWS = """
from datetime import timedelta
from django.utils import timezone
with transaction.atomic():
    for number in range(3): notify.delay("acme", number)
OutboxRow.objects.filter(pk=OutboxRow.objects.first().pk).update(error="too large")
OutboxRow.objects.update(created_at=timezone.now() - timedelta(minutes=5))
"""
COMMAND = """
from click.testing import CliRunner
from celery.bin.celery import celery
from celery_dq.cli import dq
celery.commands.setdefault("dq", dq)
answer = CliRunner().invoke(celery, ["-A", "tests.outbox.shop.celery", "dq", *{!r}.split()]).output
"""


def test_status_and_doctor_report_rows_that_wait_or_were_refused(sqlite_shop: OutboxShop) -> None:
    shop = sqlite_shop
    shop.run(ROWS)
    status = shop.run(COMMAND.format("status"))
    assert "Rows wait in the outbox of database 'default' (2), the oldest for 300 s." in status
    assert "refused rows of the outbox of database 'default' (1)" in status
    found = shop.run("import json" + COMMAND.format("status --json") + "answer = json.loads(answer)")
    (outbox,) = found["outboxes"]
    assert (outbox["database"], outbox["rows"], outbox["refused"]) == ("default", 2, 1)
    assert 299 < outbox["oldest_s"] < 400
    doctor = shop.run(COMMAND.format("doctor"))
    assert "(W041)" in doctor
    assert "(W042)" in doctor


def test_doctor_and_status_name_the_remedy_of_a_missing_table(sqlite_shop: OutboxShop) -> None:
    sqlite_shop.run(
        "with connections['default'].cursor() as cursor: cursor.execute('DROP TABLE celery_dq_outboxrow')"
    )
    for command in ("doctor", "status"):
        text = sqlite_shop.run(COMMAND.format(command))
        assert "no such table" in text
        assert "manage.py migrate" in text


METRICS = """
from django.test import RequestFactory
from celery_dq.contrib.django.views import metrics
answer = metrics(RequestFactory().get("/metrics")).content.decode()
"""


def test_metrics_count_the_rows_of_each_database(sqlite_shop: OutboxShop) -> None:
    sqlite_shop.run(ROWS)
    text: Any = sqlite_shop.run(METRICS)
    lines = text.splitlines()
    assert 'celery_dq_outbox_up{database="default"} 1.0' in lines
    assert 'celery_dq_outbox_rows{database="default"} 2.0' in lines
    assert 'celery_dq_outbox_refused_rows{database="default"} 1.0' in lines
    assert any(line.startswith('celery_dq_outbox_oldest_age_seconds{database="default"} 3') for line in lines)


def test_a_command_that_imports_no_task_finds_the_tables(sqlite_shop: OutboxShop) -> None:
    text = (
        "from celery_dq.app.api.api import dq_of\n"
        "from tests.outbox.shop.celery import app\n"
        "print(dq_of(app).outbox.inspect()[0].rows)"
    )
    done = run_python("-c", text, environment=sqlite_shop.environment)
    assert done.stdout.strip() == "0", done.stderr


def test_the_leaders_name_the_relay(sqlite_shop: OutboxShop) -> None:
    with sqlite_shop.worker(queues="other"):
        sqlite_shop.run("with transaction.atomic(): notify.delay('acme', 1)")
        sqlite_shop.await_empty()
        names = sqlite_shop.run("answer = [each.name for each in app.dq.leaders() if each.state != 'vacant']")
    assert names == ["celery outbox of shop: default"]


def test_the_dashboard_shows_the_rows(sqlite_shop: OutboxShop) -> None:
    sqlite_shop.run(ROWS)
    text = sqlite_shop.run("""
from types import SimpleNamespace
from django.test import RequestFactory
from celery_dq.contrib.django.dashboard.status import WorkersView
from django.template.loader import render_to_string
from django.http import QueryDict
found = WorkersView().read(app.dq, QueryDict(), arguments=False)
answer = [[each.database, each.rows, each.refused] for each in found["outboxes"]]
""")
    assert text == [["default", 2, 1]]


def test_an_outbox_that_cannot_be_read_hides_no_other_one(make_shop: MakeShop) -> None:
    shop = make_shop("sqlite", "default", "broken")
    shop.run(ROWS)
    shop.run(
        "with connections['broken'].cursor() as cursor: cursor.execute('DROP TABLE celery_dq_outboxrow')"
    )
    both = {"dq_outbox": "broken,default"}
    lines = shop.run(METRICS, **both).splitlines()
    assert 'celery_dq_outbox_up{database="broken"} 0.0' in lines
    assert 'celery_dq_outbox_up{database="default"} 1.0' in lines
    assert [each for each in lines if each.startswith("celery_dq_outbox_rows{")] == [
        'celery_dq_outbox_rows{database="default"} 2.0'
    ]
    assert "celery_dq_up 1.0" in lines
    found = shop.run(
        """
from dataclasses import asdict
from django.http import QueryDict
from celery_dq.contrib.django.dashboard.status import WorkersView
found = WorkersView().read(app.dq, QueryDict(), arguments=False)
answer = [asdict(each) for each in found["outboxes"]]
""",
        **both,
    )
    broken, default = found
    assert (broken["rows"], broken["oldest_s"], broken["refused"]) == (None, None, None)
    assert "no such table" in broken["error"]
    assert (default["rows"], default["refused"], default["error"]) == (2, 1, "")
    doctor = shop.run(COMMAND.format("doctor"), **both)
    assert "The outbox of database 'broken' cannot be read: OperationalError: no such table" in doctor
    assert "manage.py migrate --database broken" in doctor
    assert "Rows wait in the outbox of database 'default' (2)" in doctor
