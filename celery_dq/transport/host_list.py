"""Broker URLs with several hosts, such as ``dq-zookeeper://user:password@h1:2181,h2:2181/chroot``."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import unquote

from celery_dq.errors import ConfigurationError
from celery_dq.shown import shown_url


class Address(NamedTuple):
    """The parts of a broker URL with several hosts."""

    hosts: str
    path: str
    user: str | None
    password: str | None


def address_in(url: str) -> Address:
    """Parse a broker URL. urllib cannot: it takes everything after the first colon as the port.

    Raises:
        ConfigurationError: The URL has a query; options go into ``broker_transport_options``.
    """
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    if query:
        raise ConfigurationError(
            f"the broker URL ends in {shown_url('?' + query)}: options of {scheme}:// go into "
            "broker_transport_options"
        )
    credentials, _, place = rest.rpartition("@")
    hosts, _, path = place.partition("/")
    user, _, password = credentials.partition(":")
    return Address(hosts or "localhost", unquote(path), unquote(user) or None, unquote(password) or None)


def take_apart(client: Any) -> None:
    """Move the parts of the URL to the attributes of a kombu connection.

    Kombu masks only a password that it finds there.
    """
    if "://" in (client.hostname or ""):
        address = address_in(client.hostname)
        client.hostname = address.hosts
        client.virtual_host = address.path
        client.userid = client.userid or address.user
        client.password = client.password or address.password
