"""Wrong settings and missing libraries: each is reported once, in one line, with the remedy."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

import celery_dq
from celery_dq.errors import ConfigurationError, MissingLibrary
from tests.dq_command import run_dq

ROOT = Path(__file__).resolve().parents[2]


def run(broker: str, *words: str, **conf: Any) -> tuple[str, int]:
    with Celery("ill", broker=broker, set_as_current=False) as app:
        app.conf.update(task_publish_retry_policy={"max_retries": 0}, **conf)
        celery_dq.setup(app)
        result = run_dq(app, *words, status=None)
    return result.output, result.exit_code


def python(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("dq-redsi://localhost/0", "did you mean dq-redis://? Mend broker_url. (E002)"),
        ("dq-redis://localhost:port/0", "broker_url cannot be read: Port could not be cast"),
    ],
)
def test_a_wrong_url_is_reported_once(url: str, words: str) -> None:
    for command, status in (("status", 2), ("doctor", 1)):
        output, found = run(url, command)
        assert (output.count("ERROR"), found) == (1, status)
        assert words in output
        assert "WARNING" not in output


@pytest.mark.parametrize(("command", "status"), [("status", 2), ("doctor", 1), ("queues", 1)])
def test_a_missing_library_of_the_broker(command: str, status: int) -> None:
    # In a process of its own, in which no other test has imported the library.
    program = "import sys; sys.modules['kazoo'] = None; from celery.__main__ import main; main()"
    done = python("-c", program, "-b", "dq-zookeeper://localhost:1/x", "dq", command)
    text = "dq-zookeeper:// needs kazoo, which is not installed: pip install 'celery-dq[zookeeper]'"
    output = done.stdout + done.stderr
    assert (output.upper().count("ERROR"), done.returncode) == (1, status), output
    assert text in output


@pytest.mark.parametrize(
    ("command", "missing", "user", "words"),
    [
        ("exporter", "prometheus_client", "celery_dq.metrics.server", "exporter needs prometheus-client"),
        ("web", "waitress", "", "web needs waitress"),
        ("zookeeper", "kazoo.exceptions", "celery_dq.curator.browse", "zookeeper needs kazoo"),
    ],
)
def test_a_missing_library_of_a_command(
    command: str, missing: str, user: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, user, raising=False)
    arguments = ["localhost:1/x", "/queue"] if command == "zookeeper" else []
    output, status = run("dq-redis://localhost:1/0", command, *arguments)
    assert status == 1
    assert output.startswith(f"Error: celery dq {words}, which is not installed: pip install 'celery-dq[")


def test_the_error_of_a_missing_library_is_of_both_kinds() -> None:
    error = pickle.loads(pickle.dumps(MissingLibrary.needed_by("x = 1", "kazoo", "zookeeper")))
    assert isinstance(error, ConfigurationError)
    assert isinstance(error, ImportError)
    assert str(error) == "x = 1 needs kazoo, which is not installed: pip install 'celery-dq[zookeeper]'"


def test_a_worker_ends_with_one_line(tmp_path: Path) -> None:
    program = "from celery import Celery\napp = Celery(broker='dq-redis://')\napp.conf.dq_leese = 5\n"
    (tmp_path / "wrong.py").write_text(program)
    done = python("-m", "celery", "-A", "wrong", "worker", "-P", "solo", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("Error: settings: there is no setting 'dq_leese'; did you mean 'dq_lease'?\n")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "hook", ["", "sys.argv[0] = 'celery'; sys.excepthook = lambda *_: print('own hook')"]
)
def test_a_program_that_embeds_celery_keeps_its_tracebacks(hook: str) -> None:
    program = f"""
import sys
{hook}
import celery_dq.cli
from celery_dq.errors import ConfigurationError
raise ConfigurationError('wrong')
"""
    done = python("-c", program)
    assert ("own hook" in done.stdout, "Traceback" in done.stderr) == (bool(hook), not hook)
