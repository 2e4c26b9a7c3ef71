"""Under gunicorn and uWSGI: a master that forks workers, which share one spill directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery import Celery

import celery_dq
from celery_dq.testing.processes import free_port
from celery_dq.testing.waiting import wait_until
from tests.log_watch import WATCH
from tests.producer.conftest import Stored

WORKERS = 3
CALLS = 60


def command(kind: str, port: int) -> list[str]:
    if kind == "gunicorn":
        # Its own console script may not be on the path of the test run.
        start = "from gunicorn.app.wsgiapp import run; run()"
        words = ["--preload", "--workers", str(WORKERS), "--bind", f"127.0.0.1:{port}", "--no-control-socket"]
        return [sys.executable, "-c", start, *words, "tests.producer.web_shop:application"]
    start = "import sys, pyuwsgi; pyuwsgi.run(sys.argv[1:])"
    words = ["--http-socket", f"127.0.0.1:{port}", "--master", "--processes", str(WORKERS)]
    words += [
        "--enable-threads",
        "--die-on-term",
        "--need-app",
        "--module",
        "tests.producer.web_shop:application",
    ]
    return [sys.executable, "-c", start, *words]


class Site:
    """A web server with its workers."""

    def __init__(self, kind: str, url: str, folder: Path, queue: str, **environment: str) -> None:
        self.port = free_port()
        self.queue = queue
        self.log = folder.parent / f"{kind}.log"
        WATCH.watch(self.log)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command(kind, self.port),
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "BROKER": url,
                    "SPILL": str(folder),
                    "QUEUE": queue,
                    **environment,
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ask(self, name: str = "") -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{name}", timeout=20) as answer:
            text: str = answer.read().decode()
            return text

    def up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            self.ask()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True

    def family(self) -> list[psutil.Process]:
        """Return the processes of the workers and the master."""
        master = psutil.Process(self.process.pid)
        return [*master.children(recursive=True), master]

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def site(kind: str, url: str, folder: Path, queue: str, **environment: str) -> Iterator[Site]:
    made = Site(kind, url, folder, queue, **environment)
    try:
        wait_until(made.up, 40, what=lambda: f"{kind}:\n{made.log.read_text()}")
        yield made
    finally:
        made.end()


def call(shop: Site) -> list[str]:
    """Make calls through all workers; return the task ids that the server has acknowledged."""
    made: list[str] = []
    pids: set[str] = set()

    def enough() -> bool:
        name = f"job-{len(made)}"
        pids.add(shop.ask(name))
        made.append(name)
        return len(made) >= CALLS and len(pids) > 1

    wait_until(enough, 60, interval_s=0)
    return made


@pytest.mark.parametrize("kind", ["gunicorn", "uwsgi"])
@pytest.mark.parametrize("early", [False, True], ids=["forked-before-the-first-call", "forked-after-it"])
def test_sigterm_sends_the_rest(kind: str, early: bool, dq_url: str, stored: Stored, tmp_path: Path) -> None:
    """Each message lingers longer than the test runs, so only the regular end can have sent it."""
    conf = {"LINGER": "60s", **({"EARLY": "1"} if early else {})}
    with site(kind, dq_url, tmp_path / "spill", "web", **conf) as shop:
        called = call(shop)
        # In uWSGI's master no thread runs, so no message can be sent later.
        assert stored.ids("web") == (["master"] if early and kind == "uwsgi" else [])
        shop.process.terminate()
        shop.process.wait(40)
    expected = {*called, *(["master"] if early else [])}
    assert set(stored.ids("web")) == expected, shop.log.read_text()
    assert stored.count("web") == len(expected)


@pytest.mark.parametrize("kind", ["gunicorn", "uwsgi"])
def test_sigkill_loses_nothing(kind: str, dq_url: str, stored: Stored, tmp_path: Path) -> None:
    with site(kind, dq_url, tmp_path / "spill", "web", LINGER="60s", EARLY="1") as shop:
        called = call(shop)
        family = shop.family()
        for process in family:
            process.kill()
        shop.process.wait(30)
        psutil.wait_procs(family, timeout=30)
    app: Any = Celery("shop", broker=dq_url, set_as_current=False)
    app.conf.update(dq_buffer_folder=str(tmp_path / "spill"))
    celery_dq.setup(app)
    try:
        app.dq.buffer.replay()
        expected = {*called, "master"}
        wait_until(lambda: set(stored.ids("web")) == expected, 30)
        assert stored.count("web") == len(expected)
    finally:
        app.dq.buffer.close(5)
        app.close()
