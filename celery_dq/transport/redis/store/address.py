"""The parts of a broker URL besides host and port, and the options of connections."""

from __future__ import annotations

import inspect
import re
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from celery_dq.errors import ConfigurationError
from celery_dq.transport.aliases import CLUSTER_SCHEME

DEFAULT_PORT = 6379


def identity(connection: Any) -> str:
    """Return a name for the broker of a kombu connection.

    A list of Sentinels is one broker with one name; the brokers of a failover list have several.
    """
    if on_cluster(connection):
        return f"cluster {','.join(sorted(f'{host}:{port}' for host, port in addresses_of(connection)))}"
    place = f"{connection.hostname}:{connection.port or ''}/{connection.virtual_host or 0}"
    group = connection.transport_options.get("master_name")
    if connection.transport_cls != "dq-sentinel" or group is None:
        return place
    sentinels = sorted({urlsplit(url).netloc.rpartition("@")[2] for url in connection.alt})
    return f"{group}@{','.join(sentinels) or place}/{connection.virtual_host or 0}"


def on_cluster(connection: Any) -> bool:
    """Return whether a kombu connection is one to a Redis Cluster."""
    return bool(connection.transport_cls == CLUSTER_SCHEME)


def addresses_of(connection: Any) -> list[tuple[str, int]]:
    """Return the addresses of cluster nodes in ``host:port,host:port``, the host name of a kombu connection.

    Raises:
        ConfigurationError: A port is not a number from 1 to 65535.
    """
    addresses = []
    for place in (connection.hostname or "127.0.0.1").split(","):
        host, colon, port = place.strip().rpartition(":")
        if colon and place.strip().endswith("]"):  # an IPv6 address without a port
            host, port = place.strip(), ""
        number = port if colon and host != place.strip() else str(connection.port or DEFAULT_PORT)
        if not (number.isdecimal() and 0 < int(number) < 65536):
            raise ConfigurationError(
                f"the port {number!r} in broker_url ({place.strip()!r}) is not a number from 1 to 65535: "
                f"write {CLUSTER_SCHEME}://host:6379,host:6379"
            )
        addresses.append(((host if colon and host else place).strip("[] "), int(number)))
    return addresses


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


def option_names(connection_class: type) -> set[str]:
    """Return the names of the parameters that a class of connections of redis-py takes."""
    makers = [maker for each in connection_class.__mro__ if (maker := vars(each).get("__init__"))]
    return {name for maker in makers for name in inspect.signature(maker).parameters}


def _number(text: str) -> int | float | str:
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d*\.\d+", text) else text
