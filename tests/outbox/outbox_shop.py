"""The Django project with an outbox, as the tests use it: its environment, its programs and its workers."""

from __future__ import annotations

import ast
import json
import os
import signal
import socket
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery_dq.testing.waiting import wait_until
from tests.preloaded import ROOT, PythonFork

BEGIN = """
import django, os, signal
django.setup()
from tests.outbox.shop.console import names
globals().update(names())
"""


class Console:
    """A process of the project that runs programs of a test; see :mod:`tests.outbox.shop.console`."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        path = folder / f"console-{uuid.uuid4().hex[:6]}"
        words = ["-m", "tests.outbox.shop.console", str(path)]
        self.log = path.with_suffix(".log")
        self._process = PythonFork(words, environment, self.log)
        self._socket = socket.socket(socket.AF_UNIX)
        wait_until(lambda: self._connects(str(path)), 30, what=lambda: self.log.read_text())
        self._lines = self._socket.makefile("rw")

    def _connects(self, path: str) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        return self._socket.connect_ex(path) == 0

    def run(self, text: str) -> Any:
        """Run a program; return the value of its variable ``answer``."""
        self._lines.write(json.dumps(text) + "\n")
        self._lines.flush()
        error, answer = json.loads(self._lines.readline())
        assert error is None, error
        return answer

    def close(self) -> None:
        """End the process."""
        self._lines.close()
        self._socket.close()
        self._process.wait(30)


@dataclass
class OutboxShop:
    """The programs of the project, with one broker and its databases.

    Attributes:
        environment: The environment of its programs.
        ran: The file in which a task writes what it was called with.
        folder: The folder of the logs.
        consoles: The processes that run programs, by their environments.
    """

    environment: dict[str, str]
    ran: Path
    folder: Path
    consoles: dict[str, Console] = field(default_factory=dict)

    @classmethod
    def made(cls, databases: Mapping[str, Any], broker_url: str, folder: Path) -> OutboxShop:
        """Make a project with empty databases, and their tables.

        Args:
            databases: Django's settings of the databases.
            broker_url: The broker.
            folder: The folder of the logs.
        """
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "DJANGO_SETTINGS_MODULE": "tests.outbox.shop.settings",
            "SHOP_DATABASES": json.dumps(databases),
            "SHOP_BROKER": broker_url,
            "SHOP_RAN": str(folder / "ran"),
            "SHOP_SET": "{}",
        }
        shop = cls(environment, folder / "ran", folder)
        migrations = "\n".join(
            f"call_command('migrate', database={alias!r}, run_syncdb=True, verbosity=0)"
            for alias in databases
        )
        shop.run(f"from django.core.management import call_command\n{migrations}")
        return shop

    def close(self) -> None:
        """End the processes that run programs."""
        for console in self.consoles.values():
            console.close()

    def run(self, text: str, **settings: Any) -> Any:
        """Run a program; return the value of its variable ``answer``."""
        variables = self.variables(settings)
        key = json.dumps(variables)
        if key not in self.consoles:
            self.consoles[key] = Console(variables, self.folder)
        return self.consoles[key].run(text)

    def start(self, text: str, **settings: Any) -> PythonFork:
        """Start a program that may not end by itself."""
        return PythonFork(["-c", BEGIN + text], self.variables(settings), self.folder / "program.log")

    def variables(self, settings: dict[str, Any]) -> dict[str, str]:
        """Return the environment with further settings; names in upper case are variables themselves."""
        own = {name: value for name, value in settings.items() if name.isupper()}
        chosen = json.loads(self.environment["SHOP_SET"])
        chosen.update({name: value for name, value in settings.items() if not name.isupper()})
        return {**self.environment, "SHOP_SET": json.dumps(chosen), **own}

    @contextmanager
    def worker(self, queues: str = "push", **settings: Any) -> Iterator[PythonFork]:
        """Run a worker, which relays the outbox, too."""
        words = ["-m", "celery", "-A", "tests.outbox.shop.celery", "worker", "-P", "solo", "-l", "INFO"]
        log = self.folder / f"worker-{uuid.uuid4().hex[:6]}.log"
        options = ["-n", log.stem, "-Q", queues, "--without-mingle", "--without-gossip"]
        worker = PythonFork([*words, *options], self.variables(settings), log)
        try:
            yield worker
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.wait(30)

    def waiting(self) -> list[int]:
        """Return the numbers of the calls in the broker, in their order."""
        found = self.run("answer = [each.args for each in app.dq.queues['push'].peek(100_000)]")
        return [ast.literal_eval(each)[1] for each in found]

    def rows(self, database: str = "default") -> int:
        """Return the number of rows in an outbox."""
        count: int = self.run(f"answer = OutboxRow.objects.using({database!r}).count()")
        return count

    def has_run(self) -> list[int]:
        """Return the numbers of the calls that have run, in their order."""
        lines = self.ran.read_text().splitlines() if self.ran.exists() else []
        return [int(line.split()[-1]) for line in lines]

    def await_empty(self, database: str = "default") -> None:
        """Wait until the outbox has no row."""
        wait_until(lambda: self.rows(database) == 0, 30, what="the outbox to be empty")
