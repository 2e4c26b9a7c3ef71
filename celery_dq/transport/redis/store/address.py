"""The parts of a broker URL besides host and port."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, urlsplit


def identity(connection: Any) -> str:
    """Return a name for the broker of a kombu connection.

    A list of Sentinels is one broker with one name; the brokers of a failover list have several.
    """
    place = f"{connection.hostname}:{connection.port or ''}/{connection.virtual_host or 0}"
    group = connection.transport_options.get("master_name")
    if connection.transport_cls != "dq-sentinel" or group is None:
        return place
    sentinels = sorted({urlsplit(url).netloc.rpartition("@")[2] for url in connection.alt})
    return f"{group}@{','.join(sentinels) or place}/{connection.virtual_host or 0}"


def socket_options(hostname: str | None) -> dict[str, Any]:
    """Return the options in the query of a unix socket's URL, numbers as numbers.

    Kombu passes all of them as text, and takes the database from ``virtual_host`` only.
    """
    if not (hostname or "").startswith("socket://"):
        return {}
    query = dict(parse_qsl(urlsplit(str(hostname)).query))
    database = query.pop("virtual_host", None)
    query.pop("credential_provider", None)  # kombu makes an object of it
    options = {name: _number(value) for name, value in query.items()}
    if database is not None:
        options.setdefault("db", _number(database))
    return options


def _number(text: str) -> int | float | str:
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d*\.\d+", text) else text
