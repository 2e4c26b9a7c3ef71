"""Checks of the credentials and of TLS: before a connection, and from the error of a failed one."""

from __future__ import annotations

import importlib.util
import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kazoo.exceptions import AuthFailedError

from celery_dq.errors import ConfigurationError, MissingLibrary

__all__ = ["OURS", "Spelling", "check", "is_refusal", "why_refused"]

TLS_KEYS = ("ca", "certfile", "keyfile", "keyfile_password", "verify_certs", "check_hostname")
TLS_FILES = ("ca", "certfile", "keyfile")
#: Errors of broken connections, which are not errors of TLS settings.
BROKEN = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError, ssl.SSLWantReadError)
#: SASL mechanisms that need a password.
WITH_PASSWORD = ("DIGEST-MD5", "CRAM-MD5", "PLAIN")
#: ZooKeeper's error codes.
NO_AUTH, SESSION_CLOSED_REQUIRE_SASL = -102, -124


class Spelling(NamedTuple):
    """The names of the options that errors show, as the user writes them."""

    auth: str = "auth"
    sasl: str = "sasl"
    tls: str = "tls"


#: The names of the arguments of :class:`~celery_dq.zookeeper.session.Session`.
OURS = Spelling()


def check(
    auth: Sequence[Any],
    sasl: Mapping[str, Any] | None,
    tls: Mapping[str, Any] | None,
    spelling: Spelling = OURS,
) -> None:
    """Check the settings as far as possible without a server.

    Args:
        auth: (scheme, credential) pairs.
        sasl: kazoo's ``sasl_options``, or None.
        tls: The TLS settings, or None.
        spelling: The names of the options for errors.

    Raises:
        ConfigurationError: A setting is invalid; the text names the option and the remedy.
    """
    if not all(_is_pair(each) for each in auth):
        raise ConfigurationError(
            f"{spelling.auth} is not a list of (scheme, credential) pairs: give [('digest', 'user:password')]"
        )
    for scheme, credential in auth:
        if scheme == "digest" and ":" not in credential:
            raise ConfigurationError(
                f"{spelling.auth} names a credential of the scheme 'digest' without a colon: "
                "give 'user:password'"
            )
    if sasl is not None:
        if not sasl.get("mechanism"):
            raise ConfigurationError(
                f"{spelling.sasl} names no mechanism: give {{'mechanism': 'DIGEST-MD5', …}}"
            )
        if sasl["mechanism"] in WITH_PASSWORD and not (sasl.get("username") and sasl.get("password")):
            raise ConfigurationError(
                f"{spelling.sasl}: {sasl['mechanism']} needs a username and a password, and one is missing"
            )
        if importlib.util.find_spec("puresasl") is None:
            raise MissingLibrary.needed_by(spelling.sasl, "pure-sasl", "zookeeper-sasl")
    if tls is not None:
        _check_tls(tls, spelling.tls)


def _is_pair(each: Any) -> bool:
    return isinstance(each, (tuple, list)) and len(each) == 2 and all(isinstance(part, str) for part in each)


def _check_tls(tls: Mapping[str, Any], name: str) -> None:
    for key in tls:
        if key not in TLS_KEYS:
            raise ConfigurationError(f"{name}[{key!r}] is unknown: use {', '.join(TLS_KEYS)}")
    for key in TLS_FILES:
        path = tls.get(key)
        if path and not os.access(path, os.R_OK):
            raise ConfigurationError(f"{name}[{key!r}] = {os.fspath(path)!r} cannot be read: no such file?")
    if tls.get("certfile") and not tls.get("keyfile"):
        # kazoo would present no certificate, without an error.
        raise ConfigurationError(f"{name}['certfile'] needs {name}['keyfile']: the same file may hold both")
    if tls.get("verify_certs") is False and tls.get("check_hostname", False):
        raise ConfigurationError(
            f"{name}['check_hostname'] needs {name}['verify_certs']: leave one of them out"
        )


def is_refusal(error: BaseException) -> bool:
    """Whether this error of a request means that the server refuses the credentials."""
    return isinstance(error, AuthFailedError) or _code(error) in (NO_AUTH, SESSION_CLOSED_REQUIRE_SASL)


def why_refused(error: BaseException, spelling: Spelling = OURS) -> str | None:
    """Explain a failed connect or request by credentials or certificates.

    Args:
        error: The error, with its causes.
        spelling: The names of the options for the text.

    Returns:
        The reason and the remedy; None if the error is not a matter of credentials or certificates.
    """
    auth, sasl, tls = spelling
    for cause in _chain(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"its certificate is not valid ({cause.verify_message.rstrip('.')}): "
                f"check {tls}['ca'] and the host name"
            )
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, (*BROKEN, TimeoutError)):
            return (
                f"TLS failed ({cause.reason or cause}): check {tls}['certfile'] if the server wants a "
                "certificate, and whether this is its port for TLS"
            )
    for cause in _chain(error):
        if _code(cause) == SESSION_CLOSED_REQUIRE_SASL:
            return f"it refused the credentials, or serves no client without any: check {sasl}"
        if isinstance(cause, AuthFailedError):
            return f"it refused the credentials: check {auth} and {sasl}"
        if _code(cause) == NO_AUTH:
            return f"it denied access to the node: check {auth} and {sasl}, and the ACL of the node"
    return None


def _code(error: BaseException) -> int:
    return int(getattr(error, "code", None) or 0)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
