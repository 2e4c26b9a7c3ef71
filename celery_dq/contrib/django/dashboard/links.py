"""Addresses of pages. Names are in the query string, because they may hold any character."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.urls import reverse

__all__ = ["link_to"]


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
