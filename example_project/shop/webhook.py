"""One notice over the wire: an HTTP POST to the merchant's endpoint, with the standard library alone."""

from __future__ import annotations

import http.client
import json
import os
from urllib.parse import urlsplit

TIMEOUT = 1.0
"""Seconds that the platform waits for a merchant to answer."""

MAX_ATTEMPTS = 3
"""After this many attempts the platform gives a notice up."""


class NotDelivered(Exception):
    """The merchant did not take the notice: no answer in time, no connection, or an answer other than 2xx."""


def post(url: str, notice: dict[str, object], attempt: int) -> None:
    """Send one notice.

    :param url: the merchant's endpoint
    :param notice: the body; sent as JSON
    :param attempt: 1 for the first try
    :raises NotDelivered: when the merchant did not answer with 2xx within :data:`TIMEOUT` seconds
    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT)
    headers = {
        "Content-Type": "application/json",
        "X-Notice": str(notice["id"]),
        "X-Attempt": str(attempt),
        "X-Worker": str(os.getpid()),
    }
    try:
        connection.request("POST", parts.path, json.dumps(notice), headers)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as exc:
        raise NotDelivered(f"{url}: {exc!r}") from exc
    finally:
        connection.close()
    if not 200 <= status < 300:
        raise NotDelivered(f"{url}: HTTP {status}")
