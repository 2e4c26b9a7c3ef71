"""The dashboard without a Django project, for ``celery dq web``.

The settings of Django are made here. If the app belongs to a Django project, its settings stay, except those
that this server needs otherwise: URLs, middleware, templates, hosts and the CSRF cookie.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import django
from django.apps import apps
from django.conf import settings
from django.contrib.auth.hashers import PBKDF2PasswordHasher
from django.core.exceptions import DisallowedHost
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.http.request import split_domain_port
from django.urls import include, path

from celery_dq.contrib.django.apps import SERVED_APP
from celery_dq.contrib.django.dashboard.access import VIEW_ARGUMENTS, VIEW_QUEUES
from celery_dq.contrib.django.dashboard.views import NotFoundView
from celery_dq.errors import ConfigurationError, DQError
from celery_dq.shown import shown_logger

logger = shown_logger(__name__)

_HASHER = PBKDF2PasswordHasher()
_HASH = re.compile(r"pbkdf2_sha256\$[1-9][0-9]{0,7}\$[^$:]+\$[A-Za-z0-9+/]{43}=")
#: Seconds after a wrong login in which no other one is checked.
PAUSE_S = 0.5
#: Threads of the server; a request waits for the broker for a few seconds at most.
THREADS = 8

urlpatterns = [path("", include("celery_dq.contrib.django.urls"))]
#: A path of --origin: no query, and no empty part.
_PATH = re.compile(r"(/[\w.~%-]+)*/?")


#: The page for an unknown address. Django finds it by its name.
handler404 = NotFoundView.as_view()


def handler400(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer a request that Django refuses. Django finds this function by its name."""
    text = "Django refuses this request."
    if isinstance(exception, DisallowedHost):
        host = request.META.get("HTTP_HOST", "")
        text = (
            f"'celery dq web' does not answer to the host {host!a}. Open the address that it has printed; "
            "or start it with --origin and the address that browsers use, such as https://dash.example."
        )
    return _refusal(400, text)


def _refusal(status: int, text: str, headers: Mapping[str, str] | None = None) -> HttpResponse:
    headers = {**(headers or {}), "Content-Security-Policy": "default-src 'none'"}
    return HttpResponse(f"{text}\n", content_type="text/plain", status=status, headers=headers)


class Operator:
    """The user of a request. Its permissions are those of ``celery dq web``.

    Args:
        name: Name of the user.
        changes: Whether the user may change things.
    """

    is_authenticated = True

    def __init__(self, name: str, changes: bool) -> None:
        self._name = name
        self._changes = changes

    def get_username(self) -> str:
        """Return the name, as a user of Django has it."""
        return self._name

    def has_perm(self, permission: str) -> bool:
        """Whether the user may do this; everything but looking needs ``--allow-changes``."""
        return self._changes or permission.rpartition(".")[2] in (VIEW_QUEUES, VIEW_ARGUMENTS)


class OperatorMiddleware:
    """Sets the user of each request, and asks for a password if there are any.

    Args:
        get_response: The next step of the request.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self._get_response = get_response
        self._logins = Logins(settings.DQ_WEB_PASSWORDS) if settings.DQ_WEB_PASSWORDS else None
        self._changes: bool = settings.DQ_WEB_CHANGES

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """Answer a request, or ask for the password."""
        name: str | None = "operator"
        if self._logins is not None:
            address = request.META.get("REMOTE_ADDR", "")
            try:
                name = self._logins.name_of(request.headers.get("Authorization", ""), address)
            except TooManyLogins as exc:
                return _refusal(429, str(exc), {"Retry-After": "1"})
        if name is None:
            login = 'Basic realm="celery dq web", charset="UTF-8"'
            return _refusal(401, "Give a user and a password.", {"WWW-Authenticate": login})
        request.user = Operator(name, self._changes)  # type: ignore[assignment]  # no model
        return self._get_response(request)


class TooManyLogins(DQError):
    """Too many logins are being checked."""


class Logins:
    """Checks users and their passwords, and slows guesses down. Thread-safe.

    Args:
        hashes: The hash of the password by user.
    """

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self._hashes = hashes
        self._lock = threading.Lock()
        #: Threads that check logins; the others serve users whose login is known.
        self._places = threading.BoundedSemaphore(THREADS // 2)
        #: Digests of logins that were right; a hash costs too much for each request.
        self._known: set[bytes] = set()
        self._key = secrets.token_bytes(32)
        #: A user that does not exist takes as long as one that does.
        self._unknown = hash_password(secrets.token_hex())

    def name_of(self, authorization: str, address: str) -> str | None:
        """Return the user of a header; None when it has no login, or a wrong one.

        Raises:
            TooManyLogins: Too many other logins are being checked. Known ones are not affected.
        """
        scheme, _, packed = authorization.partition(" ")
        if scheme.lower() != "basic":
            return None
        try:
            login = base64.b64decode(packed, validate=True)
            name, _, password = login.decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return None
        digest = hashlib.blake2b(login, key=self._key).digest()
        if digest in self._known:
            return name
        if not self._places.acquire(blocking=False):
            raise TooManyLogins("Too many logins are being checked. Try again in a moment.")
        try:
            with self._lock:
                if _HASHER.verify(password, self._hashes.get(name, self._unknown)):
                    self._known.add(digest)
                    return name
                logger.warning(
                    "A wrong password for user %s of the dashboard came from %s. It is answered, and the "
                    "next login is checked, %g s later.",
                    ascii(name[:80]),
                    ascii(address),
                    PAUSE_S,
                    extra={"event": "dashboard_login_refused", "user": name[:80], "address": address},
                )
                time.sleep(PAUSE_S)  # guesses wait in one row
                return None
        finally:
            self._places.release()


def hash_password(password: str) -> str:
    """Return the hash of a password, in the form of Django's default hasher."""
    return _HASHER.encode(password, _HASHER.salt())


def is_user(name: str) -> bool:
    """Whether a line of the file of passwords can begin with this name of a user."""
    return bool(name) and not name.startswith("#") and ":" not in name and "\n" not in name


def read_passwords(file: Path) -> dict[str, str]:
    """Read a file with one ``user:hash`` per line.

    Raises:
        ConfigurationError: The file cannot be read, other users can read or write it, a line has another
            form, or a user has two passwords.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="\n") as opened:
            # The status is that of the file that is read, whatever its name stands for a moment later.
            status, text = os.fstat(opened.fileno()), opened.read()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigurationError(f"--auth {file}: the file cannot be read: {exc}") from exc
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigurationError(
            f"--auth {file}: the file belongs to user id {status.st_uid}; run: chown {os.geteuid()} {file}"
        )
    if status.st_mode & 0o077:
        mode = status.st_mode & 0o777
        raise ConfigurationError(
            f"--auth {file}: other users can use the file (mode {mode:o}); run: chmod 600 {file}"
        )
    passwords: dict[str, str] = {}
    # A password may hold any other character that Unicode counts as the end of a line.
    for number, line in enumerate((each.removesuffix("\r") for each in text.split("\n")), 1):
        if not line.strip():
            continue
        name, colon, password = line.partition(":")
        if not (is_user(name) and colon and password):
            reason = "is not user:hash; comments are not allowed"
            raise ConfigurationError(f"--auth {file}: line {number} {reason}")
        if not _HASH.fullmatch(password):
            reason = f"has no hash of a password; make the line by: celery dq web --hash {name}"
            raise ConfigurationError(f"--auth {file}: line {number} {reason}")
        if name in passwords:
            raise ConfigurationError(f"--auth {file}: line {number} names user {name!r} again; keep one")
        passwords[name] = password
    if not passwords:
        raise ConfigurationError(f"--auth {file}: the file has no line user:hash")
    return passwords


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_of(origin: str) -> str:
    """Return the host of an origin. Raises what :func:`check_origin` raises."""
    host, _ = split_domain_port(check_origin(origin)[0].partition("://")[2])
    return host.strip("[]")


#: The port that an origin of a scheme does not name.
_USUAL_PORTS = {"http": ":80", "https": ":443"}


def check_origin(address: str) -> tuple[str, str]:
    """Return the origin of a server before this one, and the path below which it has the dashboard, or "".

    The origin is spelled as browsers send it: in lower case, and without the usual port of its scheme.

    Raises:
        ConfigurationError: The address has no scheme or no host, or more than these and a path.
    """
    scheme, _, rest = address.partition("://")
    host, slash, path = rest.partition("/")
    scheme, host = scheme.lower(), host.lower()
    domain, port = split_domain_port(host)
    if (
        scheme not in _USUAL_PORTS
        or not domain
        or (":" in host.rpartition("]")[2] and not port)
        or not _PATH.fullmatch(slash + path)
    ):
        raise ConfigurationError(
            f"--origin {address}: give a scheme and a host, such as https://dash.example, and a path if the "
            "dashboard is below one: https://example.com/dq"
        )
    return f"{scheme}://{host.removesuffix(_USUAL_PORTS[scheme])}", (slash + path).rstrip("/")


def application(
    app: Any, *, host: str, changes: bool, passwords: Mapping[str, str], origin: str | None = None
) -> Any:
    """Set Django up for this process, and return the WSGI application.

    Args:
        app: The Celery app.
        host: The address that the server listens on.
        changes: Whether users may change things.
        passwords: Hash of the password by user; without any, every client is a user.
        origin: Scheme, host and path under which browsers reach a server that passes their requests on;
            default none.

    Raises:
        ConfigurationError: `origin` has another form, or the app belongs to a Django project without
            ``celery_dq.contrib.django``.
    """
    app.set_default()
    names = [host, "localhost", "127.0.0.1", "[::1]"] if origin or is_loopback(host) else ["*"]
    path = ""
    if origin:
        origin, path = check_origin(origin)
        names.append(split_domain_port(origin.partition("://")[2])[0])
    in_project = settings.configured or bool(os.environ.get("DJANGO_SETTINGS_MODULE"))
    here = "celery_dq.contrib.django"
    wanted: dict[str, Any] = {
        "ROOT_URLCONF": __name__,
        "MIDDLEWARE": [f"{__name__}.OperatorMiddleware", "django.middleware.common.CommonMiddleware"],
        "TEMPLATES": [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}],
        # A name of another host is refused: a foreign page could have made the browser ask for it.
        "ALLOWED_HOSTS": names,
        "PREPEND_WWW": False,
        "USE_X_FORWARDED_HOST": False,
        "SECURE_PROXY_SSL_HEADER": None,
        "CSRF_TRUSTED_ORIGINS": [origin] if origin else [],
        "CSRF_COOKIE_NAME": "celery_dq_csrf",
        "CSRF_COOKIE_SECURE": bool(origin and origin.startswith("https:")),
        "CSRF_COOKIE_PATH": path or "/",
        "CSRF_COOKIE_HTTPONLY": True,
        "CSRF_COOKIE_DOMAIN": None,
        "CSRF_COOKIE_SAMESITE": "Strict",
        "CSRF_USE_SESSIONS": False,
        "CSRF_FAILURE_VIEW": "django.views.csrf.csrf_failure",
        "FORCE_SCRIPT_NAME": path or None,
        "USE_TZ": True,
        "DEBUG": False,
        SERVED_APP: app,
        "DQ_WEB_PASSWORDS": dict(passwords),
        "DQ_WEB_CHANGES": changes,
    }
    if in_project:
        for name, value in wanted.items():
            setattr(settings, name, value)
    else:
        settings.configure(INSTALLED_APPS=[here], SECRET_KEY=secrets.token_urlsafe(48), **wanted)
    django.setup()
    if not apps.is_installed(here):
        raise ConfigurationError(
            f"the app belongs to a Django project; add {here!r} to its INSTALLED_APPS to serve the dashboard"
        )
    app.conf.dq_web_read_only = not changes
    return get_wsgi_application()


def serve(wsgi: Any, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve an application until the process is interrupted.

    Args:
        wsgi: The application.
        host: The address to listen on.
        port: The port; 0 takes a free one.
        ready: Called with the URL when the server listens.

    Raises:
        ConfigurationError: The address cannot be used.
    """
    import waitress

    try:
        # The server before this one may leave the path in the requests, or remove it.
        prefix = (settings.configured and settings.FORCE_SCRIPT_NAME) or ""
        server = waitress.create_server(
            wsgi, host=host, port=port, threads=THREADS, ident=None, url_prefix=prefix
        )
    except (OSError, ValueError) as exc:
        reason = f"--host {host} --port {port}: no server can listen there: {exc}"
        raise ConfigurationError(f"{reason}; give another one, --port 0 takes a free port") from exc
    shown = f"[{host}]" if ":" in host else host
    # A name such as localhost may have several addresses, with a socket for each.
    several: list[tuple[str, int]] = getattr(server, "effective_listen", [])
    try:
        ready(f"http://{shown}:{several[0][1] if several else server.effective_port}/")
        server.run()
    finally:
        server.close()
