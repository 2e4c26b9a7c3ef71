"""A wheel and an sdist of this tree, built once, and an environment with only one of them installed."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.packaging.environment import Built, Installed, build, build_wheel


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="session")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(built.wheel, tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="session")
def wheel_of_sdist(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip builds from the sdist in order to install it."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built.sdist) as sdist:
        sdist.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return build_wheel(unpacked, folder)


def install(wheel: Path, folder: Path) -> Installed:
    """Install a wheel; the libraries come from the tests' environment by a path file."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    # A pure wheel is installed by unpacking it. Python does not read path files in a folder that a path file
    # names, so an editable installation of this tree in that folder has no effect.
    zipfile.ZipFile(wheel).extractall(site)
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(folder / "bin" / "python", site / "celery_dq")
