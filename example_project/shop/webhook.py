"""Sends one notice by an HTTP POST to the merchant's endpoint, with the standard library only."""

from __future__ import annotations

import http.client
import json
import os
from urllib.parse import urlsplit

TIMEOUT = 1.0
"""Seconds that the platform waits for a merchant to answer."""

MAX_ATTEMPTS = 3
"""Number of attempts after which the platform gives a notice up."""


class NotDelivered(Exception):
    """The merchant did not accept the notice: no answer in time, no connection, or no 2xx."""


def post(url: str, notice: dict[str, object], attempt: int) -> None:
    """Send one notice.

    Args:
        url: URL of the merchant's endpoint.
        notice: The body, which is sent as JSON.
        attempt: Number of the attempt, from 1 on.

    Raises:
        NotDelivered: The merchant did not answer with 2xx within :data:`TIMEOUT` seconds.
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
