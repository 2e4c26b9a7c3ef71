"""The wheel and the sdist hold the files of the tree."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from email import message_from_bytes
from pathlib import Path

from tests.packaging.__main__ import EXTRAS
from tests.packaging.environment import ROOT, Built

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


def test_no_link_of_the_description_is_relative(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        (name,) = (each for each in wheel.namelist() if each.endswith("/METADATA"))
        description = message_from_bytes(wheel.read(name)).get_payload()
    assert isinstance(description, str)
    assert "What is promised" in description
    links = re.findall(r"<([^<>\s]+)>`_|image:: (\S+)", description)
    assert [link for link in map("".join, links) if not link.startswith("https://")] == []


def test_with_an_address_the_links_of_the_readme_are_absolute() -> None:
    made = runpy.run_path(str(ROOT / "setup.py"))["description"]
    text = made("`a\nb <docs/a.rst>`_, `c <https://c>`_\n\n.. image:: b.png\n   :alt: b\n", "https://s", "v1")
    assert text == (
        "`a\nb <https://s/blob/v1/docs/a.rst>`_, `c <https://c>`_\n\n"
        ".. image:: https://s/raw/v1/b.png\n   :alt: b\n"
    )


def test_each_extra_is_installed_by_the_program() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert set(setup["options.extras_require"]) == set(EXTRAS) - {""}


def test_the_sdist_makes_the_same_wheel(built: Built, wheel_of_sdist: Path) -> None:
    def contents(path: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(path) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/RECORD")}

    assert contents(wheel_of_sdist) == contents(built.wheel)


def test_a_call_is_published_from_a_zip_archive(redis_url: str, tmp_path: Path) -> None:
    archive = tmp_path / "shop.pyz"
    with zipfile.ZipFile(archive, "w") as zipped:
        for path in (ROOT / "celery_dq").rglob("*"):
            if path.suffix in (".py", ".lua", ".pyi"):
                zipped.write(path, path.relative_to(ROOT))
        zipped.writestr(
            "__main__.py",
            "import sys, celery_dq; from celery import Celery\n"
            "app = Celery('shop', broker=sys.argv[1], set_as_current=False); celery_dq.setup(app)\n"
            "app.send_task('notify', queue='push')\n"
            "print(celery_dq.__file__, app.dq.queues['push'].depth)\n",
        )
    url = redis_url.replace("redis", "dq-redis", 1)
    done = subprocess.run([sys.executable, str(archive), url], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == (f"{archive / 'celery_dq' / '__init__.py'} 1\n", "")
