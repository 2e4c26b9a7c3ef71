"""Session arguments from a broker URL and the transport options."""

from __future__ import annotations

import re
import socket
import ssl
from typing import Any

from kazoo.security import ACL

from celery_dq.errors import ConfigurationError
from celery_dq.zookeeper.credentials import Spelling

DEFAULT_PORT = 2181
#: The names of the options in Celery's settings, for errors.
SPELLING = Spelling(
    auth="user and password of the broker URL, broker_transport_options['auth']",
    sasl="broker_login_method, broker_transport_options['sasl']",
    tls="broker_use_ssl",
)
#: The scheme of ZooKeeper's own logins, as a login method.
DIGEST = "digest"


def host_list(hostname: str, port: int | None, chroot: str | None) -> str:
    """Return the host list for a ZooKeeper client; `port` is for hosts without a port."""
    hosts = ",".join(
        host if re.search(r":\d+$", host) else f"{host}:{port or DEFAULT_PORT}"
        for host in hostname.split(",")
        if host
    )
    chroot = (chroot or "").strip("/")
    return f"{hosts}/{chroot}" if chroot else hosts


def no_server_listens(hosts: str) -> bool:
    """Whether every host of a list refuses connections, so that waiting is useless."""
    for host in hosts.partition("/")[0].split(","):
        name, _, port = host.rpartition(":")
        try:
            socket.create_connection((name.strip("[]"), int(port)), timeout=1.0).close()
            return False
        except ConnectionRefusedError:
            continue
        except OSError:
            return False
    return True


def session_options(connection: Any) -> dict[str, Any]:
    """Make the arguments of :class:`~celery_dq.zookeeper.session.Session` for a kombu connection.

    Raises:
        ConfigurationError: An option has an invalid value.
    """
    options = connection.transport_options
    timeout = options.get("session_timeout", 10.0)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout <= 0:
        raise ConfigurationError(
            f"broker_transport_options['session_timeout'] = {timeout!r} is not a number above 0: give "
            "seconds, such as 10.0"
        )
    auth = [tuple(pair) for pair in options.get("auth", ())]
    if any(len(pair) != 2 for pair in auth):
        raise ConfigurationError(
            "broker_transport_options['auth'] is not a list of pairs (scheme, credential): give pairs such "
            "as ('digest', 'user:password')"
        )
    sasl = options.get("sasl")
    method = connection.login_method
    if method and method.lower() != DIGEST:
        if sasl:
            raise ConfigurationError(
                f"broker_login_method = {method!r} and broker_transport_options['sasl'] exclude each other: "
                "remove one of them"
            )
        sasl = {"mechanism": method, **_login(connection)}
    elif connection.userid:
        auth.append((DIGEST, f"{connection.userid}:{connection.password or ''}"))
    return {
        "timeout_s": float(timeout),
        "auth": auth,
        "sasl": sasl,
        "tls": _tls(connection.ssl),
        "acl": _acl(options.get("acl")),
        "spelling": SPELLING,
    }


def _login(connection: Any) -> dict[str, str]:
    given = {"username": connection.userid, "password": connection.password}
    return {name: value for name, value in given.items() if value}


def _acl(acl: Any) -> list[ACL] | None:
    if acl is None:
        return None
    if not isinstance(acl, (list, tuple)) or not acl or not all(isinstance(each, ACL) for each in acl):
        raise ConfigurationError(
            "broker_transport_options['acl'] is not a list of ACLs: give ACLs made by kazoo.security, such "
            "as [make_digest_acl('shop', 'secret', all=True)]"
        )
    return list(acl)


def _tls(settings: Any) -> dict[str, Any] | None:
    if not settings:
        return None
    known = {
        "ca": "ca",
        "ca_certs": "ca",
        "certfile": "certfile",
        "keyfile": "keyfile",
        "keyfile_password": "keyfile_password",
        "verify_certs": "verify_certs",
        "check_hostname": "check_hostname",
    }
    given = dict(settings) if isinstance(settings, dict) else {}
    if "cert_reqs" in given:
        # The same meaning as in kombu's settings for other brokers.
        verifies = given.pop("cert_reqs") != ssl.CERT_NONE
        given.setdefault("verify_certs", verifies)
        given.setdefault("check_hostname", verifies)
    unknown = sorted(set(given).difference(known))
    if unknown:
        raise ConfigurationError(
            f"broker_use_ssl[{unknown[0]!r}] is not an option of dq-zookeeper://: use {', '.join(known)}, "
            "cert_reqs"
        )
    return {known[name]: value for name, value in given.items()}
