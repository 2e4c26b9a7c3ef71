"""The wheel and the sdist hold the files of the tree."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from tests.packaging.environment import Built

#: Files that setuptools adds.
METADATA = ("PKG-INFO", "celery_dq.egg-info/")


def test_the_wheel_holds_every_file_of_the_package(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert files == {name for name in built.tree if name.startswith("celery_dq/")}


def test_the_sdist_holds_every_file_of_the_tree(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        files = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    assert {name for name in files if not name.startswith(METADATA)} == built.tree


def test_an_index_accepts_the_metadata_and_renders_the_readme(built: Built) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", str(built.wheel), str(built.sdist)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
    assert (done.returncode, done.stdout.count("PASSED")) == (0, 2), done.stdout + done.stderr


def test_the_sdist_makes_the_same_wheel(built: Built, wheel_of_sdist: Path) -> None:
    def contents(path: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(path) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/RECORD")}

    assert contents(wheel_of_sdist) == contents(built.wheel)
