"""``python -m tests.browser``: the dashboard in a real Chromium, and the pictures of the documentation.

The checks: no page violates the content security policy, a quota is changed with the keyboard alone, updates
come without a reload and stop while the page is hidden, and a phone has no sideways scrolling.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from tests.browser.chromium import Chromium
from tests.dashboard.shop import make_app

ROOT = Path(__file__).parents[2]
QUEUE, TENANT = "queue/?queue=push", "tenant/?queue=push&tenant=kaffee-werk"
PAGES = (
    "",
    QUEUE,
    TENANT,
    "dead-letters/?queue=push",
    "dedup/",
    "leaders/",
    "workers/",
    "message/?id=nowhere",
)
#: Name of a picture -> page, width, height, whether it is dark, whether it is a phone.
PICTURES = {
    "dashboard-queues": ("", 1180, 560, False, False),
    "dashboard-queue-dark": (QUEUE, 1180, 860, True, False),
    "dashboard-tenant": (TENANT, 1180, 700, False, False),
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
    """Run ``celery dq web``, and yield its URL."""
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


def fill(app: Any) -> None:
    """Publish the messages of a busy hour, and claim some of them."""
    numbers = random.Random(7)

    def send(tenant: str, count: int, **options: Any) -> None:
        for order in range(count):
            app.tasks["notify"].apply_async((tenant, order), **options)

    quotas = app.dq.quotas
    quotas.set_default("push", rate="6/m", concurrency=8)
    quotas.set("push", "Bluebird Books", rate="200/s", burst=50, weight=2, concurrency=2)
    quotas.set("push", "kaffee-werk", rate="20/s", burst=5, concurrency=4)
    quotas.set("push", "Osaka Knives", rate="10/h", burst=3)
    quotas.set("mail", "kaffee-werk", concurrency=3)
    for tenant, count in (
        ("Bluebird Books", 940),
        ("kaffee-werk", 410),
        ("Osaka Knives", 260),
        ("Atelier Nord", 77),
    ):
        send(tenant, count)
    for _ in range(160):
        send(f"m-{numbers.randrange(10_000, 99_999)}", 1 + numbers.randrange(3))
    quotas.pause("push", "Atelier Nord")
    send("kaffee-werk", 30, queue="mail")
    send("m-10442", 4, queue="mail", countdown=4000)
    send("nightly", 12, queue="reports", countdown=9000)
    send("ledger", 2, queue="ledger")
    consumers = [
        ("push", "web-1:4121:9f2c", 3),
        ("push", "web-2:3988:a01b", 3),
        ("mail", "mail-1:77:0c0d", 1),
    ]
    for queue, worker, turns in consumers:
        with app.dq._broker.open(queue) as (partition, client):
            for turn in range(turns):
                time.sleep(0.12)
                entries = partition.claim(worker, lease_ms=3_600_000, want=24).run(client).entries
                tags = [entry.tag for entry in entries]
                for tag in tags[:2] if queue == "push" else ():
                    reason = numbers.choice(["5 workers were lost", "TimeoutError: push gateway", "rejected"])
                    partition.dead_letter(worker, tag, reason=reason, worker=worker).run(client)
                if turn < turns - 1:
                    partition.ack(worker, finish=tags[2:20]).run(client)


def check_policy(url: str, app: Any) -> None:
    """No page reports an error or a violation, and on a phone none scrolls sideways."""
    for width, phone in ((1280, False), (390, True)):
        with Chromium(width, 800, phone=phone) as browser:
            for page in PAGES:
                browser.open(url + page)
                browser.listen(0.2)
                wide = browser.evaluate("document.documentElement.scrollWidth - innerWidth")
                assert not (phone and wide > 0), f"{page} is {wide} pixels too wide on a phone"
            # A message that is not found is no error of the page.
            assert browser.problems() == [], browser.problems()


def check_keyboard(url: str, app: Any) -> None:
    """A quota is changed with the keyboard alone, after a preview; the focus is always visible."""
    with Chromium(1280, 800) as browser:
        browser.open(url + TENANT)
        browser.press("Tab", 9)
        assert browser.evaluate("document.activeElement.className") == "skip"
        for _ in range(40):
            if browser.evaluate("document.activeElement.name") == "rate":
                break
            browser.press("Tab", 9)
            outline = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", browser.evaluate("document.activeElement.outerHTML")
        browser.evaluate("document.activeElement.select()")
        browser.call("Input.insertText", text="33/s")
        browser.press("Enter", 13, "\r")
        wait_until(
            lambda: browser.evaluate("document.querySelector('h1')?.textContent") == "Change the quota?", 10
        )
        assert app.dq.quotas.get("push", "kaffee-werk").rate == 20
        while browser.evaluate("document.activeElement.textContent") != "Change the quota":
            browser.press("Tab", 9)
        browser.press("Enter", 13, "\r")
        wait_until(lambda: browser.evaluate("Boolean(document.querySelector('.notice'))"), 10)
        assert app.dq.quotas.get("push", "kaffee-werk").rate == 33
        assert "notice" not in browser.evaluate("location.search")
        assert browser.problems() == [], browser.problems()
    app.dq.quotas.set("push", "kaffee-werk", rate="20/s")


def check_updates(url: str, app: Any) -> None:
    """A change appears without a reload, the focus stays, and a hidden or stopped page asks for nothing."""
    waiting = "document.querySelector('td[data-label=waiting]')?.textContent"
    with Chromium(1280, 800) as browser:
        browser.open(f"{url}?q=reports")
        browser.evaluate("document.querySelector('tbody a').focus()")
        app.tasks["notify"].apply_async(("nightly", 1), queue="reports")
        wait_until(lambda: browser.evaluate(waiting) == "1", 10)
        assert browser.evaluate("document.activeElement.textContent") == "reports"
        for hide, show in (
            # The protocol cannot hide a page of its only window, so the page is given the same signs.
            (_hidden("true"), _hidden("false")),
            ("document.querySelector('[data-updates-button]').click()",) * 2,
        ):
            browser.evaluate(hide)
            browser.listen(0.3)
            before = browser.requests()
            browser.listen(5)
            assert browser.requests() == before, "a page that is not looked at asks the server"
            browser.evaluate(show)
            browser.listen(1)
            assert browser.requests() > before
        assert browser.problems() == [], browser.problems()


def _hidden(value: str) -> str:
    return (
        f"Object.defineProperty(document, 'hidden', {{value: {value}, configurable: true}});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )


def take_pictures(url: str, folder: Path) -> None:
    """Write the pictures of the documentation."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (page, width, height, dark, phone) in PICTURES.items():
        with Chromium(width, height, dark=dark, phone=phone) as browser:
            browser.open(url + page)
            browser.picture(folder / f"{name}.png")
        size = (folder / f"{name}.png").stat().st_size
        print(f"{folder / name}.png: {size // 1024} KiB")
        assert size <= 150 * 1024, "a picture has at most 150 KiB"


def main() -> int:
    """Run the checks, or take the pictures."""
    parser = argparse.ArgumentParser(prog="python -m tests.browser", description=__doc__)
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="write the pictures, and check nothing"
    )
    folder = parser.parse_args().pictures
    with RedisServer() as server:
        broker_url = server.url(scheme="dq-redis")
        app = make_app(broker_url)
        fill(app)
        with dashboard(broker_url) as url:
            if folder is not None:
                take_pictures(url, folder)
                return 0
            for check in (check_policy, check_keyboard, check_updates):
                began = time.monotonic()
                check(url, app)
                print(f"{check.__name__}: ok, {time.monotonic() - began:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
