"""The pages in a real browser: no error of the console, accessible, usable by keyboard and on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from playwright.sync_api import Page, expect

from tests.browser.busy_hour import fill, write_history
from tests.browser.conftest import Look
from tests.integration.shop import send

AXE = (Path(axe_playwright_python.__file__).with_name("axe.min.js")).read_text()
QUEUE, TENANT = "queue/?queue=push", "tenant/?queue=push&tenant=kaffee-werk"
#: Path of a page -> a selector that has to be there.
PAGES = {
    "": "td[data-label=waiting]",
    QUEUE: ".plot .line",
    "queue/?queue=parted": "td[data-label=workers]",
    TENANT: "input[name=rate]",
    "dead-letters/": "tbody a",
    "dead-letters/?queue=push": "td.choice",
    "dedup/": "h1",
    "dedup/?queue=push": "h1",
    "leaders/": "h1",
    "workers/": "tbody th",
    "audit/": "tbody th",
    "message/?id=nowhere": ".explanation",
    "message/?id={waiting}": ".edits",
    "message/arguments/?queue=push&id={waiting}": "textarea",
    "dead-letters/letter/?queue=push&id={dead}": "textarea",
}


@pytest.fixture
def busy(shop: Any) -> Any:
    """The queues of a busy hour, with fewer messages."""
    fill(shop, part=0.1)
    write_history(shop)
    send(shop, "kaffee-werk", queue="parted")
    shop.dq.queues["parted"].set_partitions(2)
    with shop.dq._broker.open_home("parted") as (partition, client):
        partition.claim("worker6d8f9c7b5dx2x7k:18914:6e78b9651c33", lease_ms=3_600_000, want=1).run(client)
    return shop


def violations(page: Page, *rules: str) -> list[str]:
    """Return the serious and critical findings of axe-core, of all rules or of some."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE)
    options = {"resultTypes": ["violations"]} | ({"runOnly": rules} if rules else {})
    found = page.evaluate("options => axe.run(options)", options)["violations"]
    return [
        f"{each['id']}: {node['html'][:200]}"
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


def test_every_page_is_accessible_and_has_no_error(busy: Any, look: Look) -> None:
    (waiting,), (dead,) = busy.dq.queues["push"].peek(1), busy.dq.dead_letters["push"].list(1)
    for options in ({}, {"width": 320, "phone": True}):
        with look("all", **options) as window:
            for path, there in PAGES.items():
                window.page.goto(path.format(waiting=waiting.id, dead=dead.id))
                expect(window.page.locator(there).first).to_be_visible()
                if not options:
                    assert violations(window.page) == [], path
                    # A dark page has other colours, and no other difference.
                    window.page.emulate_media(color_scheme="dark", reduced_motion="reduce")
                    assert violations(window.page, "color-contrast") == [], path
                    window.page.emulate_media(color_scheme="light")
                # A phone zooms out of a page that is too wide: its innerWidth grows with the page.
                wide = window.page.evaluate(
                    "(({scrollWidth, clientWidth}) => scrollWidth - clientWidth)(document.documentElement)"
                )
                assert wide <= 0, f"{path} is {wide} pixels too wide for {options}"
        assert window.problems == []


def test_a_quota_is_changed_with_the_keyboard_alone(busy: Any, look: Look) -> None:
    with look("all") as window:
        page, press = window.page, window.page.keyboard.press
        page.goto(TENANT)
        press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        for _ in range(40):
            press("Tab")
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
            if page.evaluate("document.activeElement.name") == "rate":
                break
        press("Control+a")
        page.keyboard.insert_text("33/s")
        press("Enter")
        expect(page.locator("h1")).to_have_text("Change the quota?")
        assert violations(page) == []
        assert busy.dq.quotas.get("push", "kaffee-werk").rate == 20
        while page.evaluate("document.activeElement.textContent") != "Change the quota":
            press("Tab")
        press("Enter")
        expect(page.locator(".notice")).to_contain_text("rate=33/s")
        assert busy.dq.quotas.get("push", "kaffee-werk").rate == 33
        # A reload or a bookmark does not show the notice again.
        assert "notice" not in page.url
        assert window.problems == []


def test_a_form_keeps_its_input_after_an_error(busy: Any, look: Look) -> None:
    with look("all") as window:
        page = window.page
        page.goto(TENANT)
        page.get_by_label("Rate").fill("33/y")
        page.get_by_label("Weight").fill("2.5")
        for _ in range(2):
            page.get_by_role("button", name="Preview the change").click()
            page.get_by_role("link", name="Go back").click()
            assert page.get_by_label("Rate").input_value() == "33/y"
            assert page.get_by_label("Weight").input_value() == "2.5"
        # Another look at the page has the values of the broker.
        page.goto(TENANT)
        assert page.get_by_label("Rate").input_value() == "20/s"


def test_shortcuts_lead_through_the_dashboard(busy: Any, look: Look) -> None:
    with look("view_queues") as window:
        page, press = window.page, window.page.keyboard.press
        page.goto("")
        panel = page.locator("#shortcuts")
        press("?")
        expect(panel).to_be_visible()
        assert violations(page) == []
        press("Escape")
        expect(panel).to_be_hidden()
        press("s")
        expect(page.locator("[data-updates-button]")).to_have_text("Go on updating")
        press("g")
        press("d")
        expect(page.locator("h1")).to_have_text("Dead letters")
        press("/")
        assert page.evaluate("document.activeElement.type") == "search"
        # A user who types gets the letters.
        page.keyboard.type("g?q")
        assert page.evaluate("document.activeElement.value") == "g?q"
        expect(panel).to_be_hidden()
        assert window.problems == []


def test_a_change_appears_without_a_reload_and_only_while_the_page_is_looked_at(
    shop: Any, look: Look
) -> None:
    send(shop, "a")
    with look("view_queues") as window:
        page = window.page
        # The clock of the page is the test's, so that no update is waited for.
        page.clock.install()
        page.goto("?q=push")
        waiting = page.locator("td[data-label=waiting]")
        expect(waiting).to_have_text("1")
        page.locator("tbody a").first.focus()
        send(shop, "a")
        page.clock.run_for(2_100)
        expect(waiting).to_have_text("2")
        assert page.evaluate("document.activeElement.textContent") == "push"
        for hide, show in ((hidden("true"), hidden("false")), (BUTTON, BUTTON)):
            page.evaluate(hide)
            asked = len(window.requests)
            page.clock.run_for(60_000)
            assert len(window.requests) == asked
            with page.expect_request("**/dq/*"):
                page.evaluate(show)
        assert window.problems == []


BUTTON = "document.querySelector('[data-updates-button]').click()"


def hidden(value: str) -> str:
    """Return a script that gives the page the signs of a hidden tab."""
    return (
        f"Object.defineProperty(document, 'hidden', {{value: {value}, configurable: true}});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
