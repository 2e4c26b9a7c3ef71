"""Chromium, its pages, and the errors that they report."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field

from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

__all__ = ["Window", "chromium", "find_chromium"]

#: The programs that are a Chromium. The first one has no window and starts fastest.
PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
#: Milliseconds for which an element or a page is waited for.
PATIENCE_MS = 10_000


def find_chromium() -> str:
    """Return the path of a Chromium.

    Raises:
        FileNotFoundError: There is none on the PATH.
    """
    for name in PROGRAMS:
        if path := shutil.which(name):
            return path
    raise FileNotFoundError(
        "no Chromium found: put chromium-headless-shell or chromium on the PATH "
        "(apt-get install --no-install-recommends chromium-headless-shell)"
    )


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser, and end it with the block."""
    with sync_playwright() as playwright:
        # The sandbox needs rights that a container seldom has; the pages are our own.
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Window:
    """A window with cookies of its own.

    Attributes:
        page: Its page.
        problems: The errors and warnings of the console, such as violations of the content security policy.
        requests: The addresses that the page has asked for.
    """

    page: Page
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        browser: Browser,
        address: str,
        *,
        width: int = 1280,
        height: int = 800,
        dark: bool = False,
        phone: bool = False,
    ) -> Iterator[Window]:
        """Open a window, and close it with the block. Paths are below `address`."""
        context = browser.new_context(
            base_url=address,
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            is_mobile=phone,
            has_touch=phone,
        )
        context.set_default_timeout(PATIENCE_MS)
        window = cls(context.new_page())
        window.page.on("console", window._note)
        window.page.on("pageerror", lambda error: window.problems.append(str(error)))
        window.page.on("request", lambda request: window.requests.append(request.url))
        try:
            yield window
        finally:
            context.close()

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.text} {message.location.get('url', '')}")
