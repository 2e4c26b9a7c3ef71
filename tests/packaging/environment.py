"""Builds the package, and runs the installed package outside of the tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
SHOP = Path(__file__).with_name("shop.py")
BUILD = """
import sys
from setuptools import build_meta

_, folder, *kinds = sys.argv  # setuptools writes its own arguments there
for kind in kinds:
    getattr(build_meta, f"build_{kind}")(folder)
"""


class Built(NamedTuple):
    """The results of a build.

    Attributes:
        tree: The files of the tree, relative to its top.
        sdist: Path of the sdist.
        wheel: Path of the wheel.
    """

    tree: frozenset[str]
    sdist: Path
    wheel: Path


class Installed(NamedTuple):
    """An environment with a wheel and the libraries of the tests' environment, but without this tree.

    Attributes:
        python: Path of its interpreter.
        package: Folder of the installed package.
    """

    python: Path
    package: Path

    def celery(self, *arguments: str) -> list[str]:
        return [str(self.python), "-m", "celery", *arguments]


def build(top: Path) -> Built:
    """Build in a folder, from a copy of the tree, so that no build leaves files in it."""
    # Files that version control ignores.
    unknown = [line.strip("/").rpartition("/")[2] for line in (ROOT / ".gitignore").read_text().splitlines()]
    shutil.copytree(ROOT, top / "tree", ignore=shutil.ignore_patterns(".git", *unknown))
    tree = frozenset(
        str(path.relative_to(top / "tree")) for path in (top / "tree").rglob("*") if path.is_file()
    )
    _build(top / "tree", top, "sdist", "wheel")
    (sdist,), (wheel,) = top.glob("*.tar.gz"), top.glob("*.whl")
    return Built(tree, sdist, wheel)


def build_wheel(source: Path, folder: Path) -> Path:
    """Build a wheel of a source tree, in which the build leaves files, into a folder."""
    _build(source, folder, "wheel")
    (wheel,) = folder.glob("*.whl")
    return wheel


def _build(source: Path, folder: Path, *kinds: str) -> None:
    command = [sys.executable, "-c", BUILD, str(folder), *kinds]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


class Shop:
    """A folder with the app, outside of the tree, and an environment in which the app runs.

    Args:
        folder: Folder for the app.
        installed: The environment.
        conf: Settings of the app.
    """

    def __init__(self, folder: Path, installed: Installed, conf: dict[str, Any]) -> None:
        self._folder = folder
        self._installed = installed
        self._log = folder / "worker.log"
        shutil.copy(SHOP, folder / "shop.py")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._environment = {**kept, "SHOP": json.dumps({**conf, "dq_buffer_folder": str(folder / "buffer")})}

    def call(self) -> list[str]:
        """Return the output of the program, which calls a task of each kind."""
        return self._run([str(self._installed.python), "shop.py"])

    def doctor(self) -> list[str]:
        return self._run(self._installed.celery("-A", "shop", "dq", "doctor"))

    def scheduler(self, name: str) -> list[str]:
        """Return the class of the scheduler that ``celery beat -S`` loads by this name."""
        program = (
            "import sys; from celery.beat import Service; from shop import app; "
            "print(type(Service(app, scheduler_cls=sys.argv[1]).get_scheduler(lazy=True)))"
        )
        return self._run([str(self._installed.python), "-c", program, name])

    @contextmanager
    def worker(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run a worker of all queues, which writes to its log."""
        command = self._installed.celery("-A", "shop", "worker", "-P", "solo", "-Q", "celery,ledger")
        with self._log.open("w") as log:
            worker = subprocess.Popen(
                command, cwd=self._folder, env=self._environment, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            yield worker
        finally:
            worker.kill()
            worker.wait()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def _run(self, command: list[str]) -> list[str]:
        done = subprocess.run(
            command, cwd=self._folder, env=self._environment, capture_output=True, text=True, timeout=100
        )
        text = self.log if self._log.exists() else ""
        assert done.returncode == 0, f"{done.stdout}{done.stderr}{text}"
        return done.stdout.splitlines()
