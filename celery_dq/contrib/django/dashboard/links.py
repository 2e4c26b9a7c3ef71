"""Addresses of pages; style, script and icon.

Names are in the query string, because they may hold any character. The files come from the same origin as the
pages, which the content security policy demands, and neither ``collectstatic`` nor a setting is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from zlib import crc32

from django.http import Http404, HttpRequest, HttpResponse
from django.urls import reverse


def link_to(page: str, /, **query: Any) -> str:
    """Return the address of a page.

    Args:
        page: Name of the page in ``celery_dq.contrib.django.urls``.
        query: Parameters; None leaves one out.
    """
    given = {name: value for name, value in query.items() if value is not None}
    # A name that is not valid Unicode has no address. Its link leads to a page that says so.
    text = urlencode(given, errors="backslashreplace")
    return reverse(f"celery_dq:{page}") + (f"?{text}" if text else "")


_FOLDER = Path(__file__).parents[1] / "assets"
_TYPES = {
    "dashboard.css": "text/css",
    "dashboard.js": "text/javascript",
    "shortcuts.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}


def asset_address(name: str) -> str:
    """Return the address of a file."""
    # A template gives a subclass of str, which a path does not take.
    version = crc32(Path(f"{_FOLDER}/{name}").read_bytes())
    return f"{reverse('celery_dq:asset', args=[name])}?v={version:08x}"


def asset(request: HttpRequest, name: str) -> HttpResponse:
    """Return a file. Its address changes with its content, so browsers may keep it."""
    if name not in _TYPES:
        raise Http404
    data = (_FOLDER / name).read_bytes()
    response = HttpResponse(data, content_type=f"{_TYPES[name]}; charset=utf-8")
    response["Cache-Control"] = "private, max-age=86400"
    response["X-Content-Type-Options"] = "nosniff"
    return response
