"""Broker URLs with several hosts, the options in a URL, and transport options that no broker here has.

Kombu hands an unknown option on to a constructor, whose ``TypeError`` names neither the URL nor a remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

from celery_dq.errors import ConfigurationError
from celery_dq.shown import shown_url
from celery_dq.transport.aliases import CLUSTER_SCHEME, TENANT_SCHEMES, alternatives_in

__all__ = ["refuse_key_prefix", "refuse_unknown_options", "take_apart"]

#: Values of ``ssl_cert_reqs`` that kombu reads.
_CERT_REQS = ("required", "optional", "none", "CERT_REQUIRED", "CERT_OPTIONAL", "CERT_NONE")
#: Options in the URL of a server on TCP.
_TCP_OPTIONS = (
    "credential_provider",
    "ssl_ca_certs",
    "ssl_ca_data",
    "ssl_ca_path",
    "ssl_cert_reqs",
    "ssl_certfile",
    "ssl_check_hostname",
    "ssl_ciphers",
    "ssl_keyfile",
    "ssl_ocsp_expected_cert",
    "ssl_password",
    "ssl_validate_ocsp",
    "ssl_validate_ocsp_stapled",
)
#: Transport options that concern the connection, which the URL of a unix socket may hold, too.
_TRANSPORT_OPTIONS = (
    "client_name",
    "health_check_interval",
    "max_connections",
    "retry_on_timeout",
    "socket_connect_timeout",
    "socket_keepalive",
    "socket_timeout",
)
#: Options in the URL of a unix socket.
_SOCKET_OPTIONS = (
    "credential_provider",
    "db",
    "password",
    "protocol",
    "username",
    "virtual_host",
    *(each for each in _TRANSPORT_OPTIONS if each != "socket_keepalive"),
)


#: Options of other brokers that kombu accepts for Redis without any effect, and their remedies.
_WITHOUT_EFFECT = {
    "heartbeat": "it has no effect on Redis, where workers renew leases of dq_lease instead; remove it",
    "login_method": "it has no effect on Redis; remove it",
    "visibility_timeout": "it has no effect here, where workers renew leases of dq_lease instead; remove it",
}


def refuse_unknown_options(url: Any) -> None:
    """Refuse an option in the query of a broker URL that has no effect there.

    Args:
        url: Broker URL, several joined by semicolons, or a list of URLs. A Redis Cluster and brokers other
            than the tenant broker are not checked.

    Raises:
        ConfigurationError: An option is unknown, or the value of ``ssl_cert_reqs`` is.
    """
    for alternative in alternatives_in(url):
        address, _, query = alternative.partition("?")
        scheme, _, kind = address.partition("://")[0].partition("+")
        if scheme not in TENANT_SCHEMES or scheme == CLUSTER_SCHEME:
            continue
        known = _SOCKET_OPTIONS if kind == "socket" else _TCP_OPTIONS
        for name, value in parse_qsl(query):
            if name not in known:
                # The value is not shown: a misspelt password is a password.
                raise ConfigurationError(
                    f"broker_url has the unknown option {name!r}: {_remedy(name, known)}"
                )
            if name == "ssl_cert_reqs" and value not in _CERT_REQS:
                raise ConfigurationError(
                    f"broker_url has ssl_cert_reqs = {value!r}: give {', '.join(_CERT_REQS[:2])} or none"
                )


def _remedy(name: str, known: tuple[str, ...]) -> str:
    if name in _WITHOUT_EFFECT:
        return _WITHOUT_EFFECT[name]
    close = [*get_close_matches(name, known, 1), *get_close_matches(name, _TRANSPORT_OPTIONS, 1)]
    if not close:
        return f"known are {', '.join(known)}"
    if close[0] in known:
        return f"did you mean {close[0]}?"
    question = "" if close[0] == name else f"did you mean {close[0]}? Then "
    return f"{question}set broker_transport_options = {{{close[0]!r}: …}}"


def refuse_key_prefix(transport_options: Mapping[str, Any]) -> None:
    """Refuse kombu's prefix of keys, which would leave workers and producers with different queues.

    Raises:
        ConfigurationError: The option is set.
    """
    prefix = transport_options.get("global_keyprefix")
    if prefix:
        raise ConfigurationError(
            f"broker_transport_options['global_keyprefix'] = {prefix!r} would reach only some of the keys: "
            "set dq_key_prefix instead, to the same value in all workers and producers"
        )


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
