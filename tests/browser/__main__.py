"""``python -m tests.browser``: take the pictures of the documentation, by ``celery dq web``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from celery_dq.testing.servers import RedisServer
from tests.browser.busy_hour import fill, served, write_history
from tests.browser.chromium import Window, chromium
from tests.dashboard.shop import make_app

#: Seconds in which every tenant is served, before the first picture.
WARM_UP_S = 10.0
ROOT = Path(__file__).parents[2]
QUEUE, TENANT = "queue/?queue=push", "tenant/?queue=push&tenant=kaffee-werk"
#: Name of a picture -> page, width, height, whether it is dark, whether it is a phone.
PICTURES = {
    "dashboard-queues": ("", 1180, 560, False, False),
    "dashboard-queue-dark": (QUEUE, 1180, 972, True, False),
    "dashboard-dead-letters": ("dead-letters/?queue=push", 1180, 560, False, False),
    "dashboard-tenant": (TENANT, 1180, 860, False, False),
    "dashboard-phone-dark": ("", 390, 780, True, True),
}
CELERY = """
import sys
from celery_dq.cli import dq
from celery.bin.celery import celery, main
celery.commands.setdefault("dq", dq)
sys.exit(main())
"""


@contextlib.contextmanager
def dashboard(broker_url: str) -> Iterator[str]:
    words = ["-A", "tests.dashboard.shop", "-b", broker_url, "dq", "web", "--port", "0", "--allow-changes"]
    process = subprocess.Popen(
        [sys.executable, "-c", CELERY, *words, "--json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        document = "".join(iter(process.stdout.readline, "}\n")) + "}"
        yield json.loads(document)["url"]
    finally:
        process.terminate()
        process.wait()


def take_pictures(url: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for name, (page, width, height, dark, phone) in PICTURES.items():
            with Window.open(browser, url, width=width, height=height, dark=dark, phone=phone) as window:
                window.page.goto(page)
                window.page.screenshot(path=folder / f"{name}.png")
            size = (folder / f"{name}.png").stat().st_size
            print(f"{folder / name}.png: {size // 1024} KiB")
            assert size <= 150 * 1024, "a picture has at most 150 KiB"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.browser", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "docs" / "figures", metavar="FOLDER")
    folder = parser.parse_args().folder
    with RedisServer() as server:
        broker_url = server.url(scheme="dq-redis")
        app = make_app(broker_url)
        fill(app)
        write_history(app)
        with served(app, warm_up_s=WARM_UP_S), dashboard(broker_url) as url:
            take_pictures(url, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
