"""A browser, and the dashboard of a Django project that it can reach."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.browser.chromium import Window, chromium
from tests.dashboard.conftest import login, patient_pages, project, shop, use_app

__all__ = ["login", "patient_pages", "project", "shop", "use_app"]

Look = Callable[..., contextlib.AbstractContextManager[Window]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def address(project: None) -> Iterator[str]:
    """The address of the dashboard, which a thread of this process serves."""
    from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
    from django.core.wsgi import get_wsgi_application

    class SilentHandler(WSGIRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadedWSGIServer(("127.0.0.1", 0), SilentHandler)
    server.set_app(get_wsgi_application())
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/dq/"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def look(browser: Browser, address: str, login: Any, monkeypatch: pytest.MonkeyPatch) -> Look:
    """A function that opens a window of a user with permissions; "all" stands for all of them.

    Paths of the window are below the dashboard.
    """
    # Playwright runs an event loop in this thread, where Django refuses a database without this variable.
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")

    @contextlib.contextmanager
    def look(*permissions: str, **options: Any) -> Iterator[Window]:
        cookie = login(*permissions).cookies["sessionid"].value
        with Window.open(browser, address, **options) as window:
            window.page.context.add_cookies([{"name": "sessionid", "value": cookie, "url": address}])
            yield window

    return look
