"""``celery dq web``, and the app in other Django projects: processes of their own."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from django.contrib.auth.hashers import PBKDF2PasswordHasher

from celery_dq.contrib.django.dashboard.standalone import (
    PAUSE_S,
    Logins,
    TooManyLogins,
    check_origin,
    hash_password,
    read_passwords,
    serve,
)
from celery_dq.errors import ConfigurationError
from celery_dq.testing.waiting import wait_until
from tests.dashboard.shop import make_app
from tests.dq_command import run_dq
from tests.integration.test_django import PROJECT, ROOT
from tests.preloaded import PythonFork, run_python

Web = Callable[..., str]
#: In the form of the hash of a password.
HASH = f"pbkdf2_sha256$1$salt${'A' * 43}="


@pytest.fixture
def web(redis_url: str, tmp_path: Path) -> Iterator[Web]:
    """A function that runs ``celery dq web`` and returns its URL."""
    running: list[tuple[PythonFork, Path]] = []

    def web(*words: str, app: str = "tests.dashboard.shop", **environment: str) -> str:
        url = redis_url.replace("redis://", "dq-redis://", 1)
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(PROJECT)]), **environment}
        command = ["-m", "celery", "-A", app, "-b", url, "dq", "web", "--port", "0", "--json", *words]
        log, errors = tmp_path / f"{len(running)}.log", tmp_path / f"{len(running)}.errors"
        process = PythonFork(command, variables, log, errors=errors)
        running.append((process, errors))
        wait_until(lambda: log.read_text().endswith("}\n"), what=lambda: errors.read_text())
        return str(json.loads(log.read_text())["url"])

    yield web
    for process, errors in running:
        process.terminate()
        # The server may have logged that a request had to wait on a busy machine.
        assert (process.wait(30), errors.read_text().splitlines()[-1:]) == (0, ["Stopped."])


def ask(
    url: str, path: str = "/", method: str = "GET", body: str = "", **headers: str
) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection(url.removeprefix("http://").rstrip("/"), timeout=20)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.headers


def test_the_server_is_read_only_and_answers_to_its_own_name(web: Web) -> None:
    url = web()
    assert url.startswith("http://127.0.0.1:")
    status, text, headers = ask(url)
    assert status == 200
    assert "read-only" in text
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    # Another site cannot read the pages by pointing its own name at this machine.
    status, text, _ = ask(url, Host="evil.example")
    assert (status, "to the host 'evil.example'" in text, "--origin" in text) == (400, True, True)
    _, body, form = form_of(ask(url, "/tenant/?queue=push&tenant=a"))
    assert ask(url, "/tenant/pause/", "POST", body, **form)[0] == 405
    # A program without a token learns the same.
    status, text, headers = ask(url, "/tenant/pause/", "POST")
    assert (status, "--allow-changes" in text) == (405, True)
    assert "default-src 'none'" in headers["Content-Security-Policy"]


def password_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "passwords"
    file.write_text(text, encoding="utf-8")
    file.chmod(mode)
    return file


def form_of(answer: tuple[int, str, http.client.HTTPMessage]) -> tuple[str, str, dict[str, str]]:
    """The cookie of a page, and body and headers of its form."""
    _, text, headers = answer
    token = text.partition('csrfmiddlewaretoken" value="')[2].partition('"')[0]
    cookie = headers.get("Set-Cookie", "")
    form = {"Cookie": cookie.partition(";")[0], "Content_Type": "application/x-www-form-urlencoded"}
    return cookie, f"queue=push&tenant=a&csrfmiddlewaretoken={token}", form


def test_changes_and_passwords(web: Web, tmp_path: Path) -> None:
    passwords = password_file(tmp_path, f"eve:{hash_password('päss:word')}\n\n")
    url = web("--allow-changes", "--auth", str(passwords), "--origin", "https://dash.example")
    unknown = basic("adam:päss:word"), basic("")
    for wrong in ("", "Bearer x", "Basic %%", basic("eve:other"), basic("eve"), *unknown):
        status, _, headers = ask(url, Authorization=wrong)
        assert (status, headers["WWW-Authenticate"].partition(" ")[0]) == (401, "Basic"), wrong
    right = basic("eve:päss:word")
    cookie, body, form = form_of(ask(url, "/tenant/?queue=push&tenant=a", Authorization=right))
    form["Authorization"] = right
    assert ask(url, "/tenant/pause/", "POST", "queue=push&tenant=a", **form)[0] == 403
    assert ask(url, "/tenant/pause/", "POST", body, **form)[0] == 302
    # A server with TLS keeps the browser's headers.
    assert "Secure" in cookie
    for origin, status in (("https://dash.example", 302), ("https://evil.example", 403)):
        given = {**form, "Host": "dash.example", "Origin": origin}
        assert ask(url, "/tenant/pause/", "POST", body, **given)[0] == status
    assert "paused" in ask(url, "/tenant/?queue=push&tenant=a&format=json", Authorization=right)[1]


def test_an_unknown_address_has_a_page_of_the_dashboard(web: Web, tmp_path: Path) -> None:
    passwords = password_file(tmp_path, f"eve:{hash_password('word')}\n")
    url, right = web("--auth", str(passwords)), basic("eve:word")
    for path in ("/nowhere/", "/queue/<b>x/", "/assets/nothing.css"):
        status, text, headers = ask(url, quote(path), Authorization=right)
        assert (status, "No such page" in text, "<b>" in text) == (404, True, False), path
        assert 'href="/"' in text
        assert "default-src 'none'" in headers["Content-Security-Policy"]
    status, text, _ = ask(url, "/nowhere/?format=json", Authorization=right)
    assert (status, json.loads(text)["failure"]["status"]) == (404, 404)
    status, text, headers = ask(url, "/nowhere/", "POST", Authorization=right)
    assert (status, "No such page" in text) == (404, True)
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert ask(url, "/nowhere/")[0] == 401
    # An address without its last slash is corrected, not unknown.
    assert ask(url, "/queue?queue=push", Authorization=right)[0] == 301


def basic(credentials: str) -> str:
    return f"Basic {base64.b64encode(credentials.encode()).decode()}"


def test_the_server_shows_the_app_of_a_django_project(web: Web, redis_url: str) -> None:
    broker = redis_url.replace("redis://", "dq-redis://", 1)
    url = web(app="shop", DJANGO_SETTINGS_MODULE="shop.settings", SHOP_BROKER=broker)
    document = json.loads(ask(url, "/?format=json")[1])
    assert document["environment"] == "sandbox"
    assert [row["queue"]["name"] for row in document["queues"]] == ["push"]


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (None, 0o600, "cannot be read"),
        (f"eve:{HASH}\n", 0o644, "chmod 600"),
        ("eve\n", 0o600, "line 1 is not user:hash"),
        ("\n", 0o600, "has no line"),
        (f"eve:{HASH}\n#adam:{HASH}\n", 0o600, "comments are not allowed"),
        (f"\ufeffeve:{HASH}\neve:{HASH}\n", 0o600, "line 2 names user 'eve' again"),
        (
            "eve:secret\n",
            0o600,
            "line 1 has no hash of a password; make the line by: celery dq web --hash",
        ),
    ],
)
def test_a_file_of_passwords_is_checked(tmp_path: Path, content: str | None, mode: int, reason: str) -> None:
    file = tmp_path / "passwords" if content is None else password_file(tmp_path, content, mode)
    assert reason in refused("--auth", str(file))


def test_an_address_of_other_machines_needs_passwords() -> None:
    assert "give --auth FILE" in refused("--host", "0.0.0.0")
    assert "give --auth FILE" in refused("--host", "::")
    assert "give --auth FILE" in refused("--origin", "https://dash.example")


def test_a_line_of_the_file_of_passwords_is_made_from_a_prompt(tmp_path: Path) -> None:
    result = run_dq(make_app("dq-redis://127.0.0.1:1/0"), "web --hash eve", answer="päss:word\n" * 2)
    line = result.stdout.splitlines()[-1]
    assert "päss" not in line
    file = password_file(tmp_path, line + "\n")
    # A hash of another program with Django's hasher serves as well, whatever its iterations are.
    hashes = {**read_passwords(file), "adam": PBKDF2PasswordHasher().encode("päss:word", "salt", 1)}
    logins = Logins(hashes)
    assert logins.name_of(basic("eve:päss:word"), "10.0.0.1") == "eve"
    assert logins.name_of(basic("adam:päss:word"), "10.0.0.1") == "adam"
    assert logins.name_of(basic("eve:päss:Word"), "10.0.0.1") is None


@pytest.mark.parametrize("name", ["", "a:b", "#eve", "eve\nadam"])
def test_a_user_that_no_line_of_the_file_can_have_gets_no_hash(name: str) -> None:
    assert "give the name of a user, without ':'" in refused("--hash", name)


def test_wrong_logins_wait_in_a_row_and_known_ones_do_not(caplog: pytest.LogCaptureFixture) -> None:
    logins = Logins({"eve": hash_password("right")})
    assert logins.name_of(basic("eve:right"), "10.0.0.1") == "eve"
    began = time.monotonic()
    with ThreadPoolExecutor(20) as pool:
        guesses = [pool.submit(logins.name_of, basic(f"eve\n:{number}"), "10.0.0.9") for number in range(20)]
        wait_until(lambda: "A wrong password" in caplog.text, 30)
        with logins._lock:  # the place of the guess whose turn it is
            assert logins.name_of(basic("eve:right"), "10.0.0.1") == "eve"
        refusals = [guess.exception() for guess in guesses]
    checked = refusals.count(None)
    assert 1 <= checked < 20
    assert all(isinstance(error, TooManyLogins) for error in refusals if error is not None)
    assert time.monotonic() - began >= checked * PAUSE_S
    texts = [
        record.getMessage()
        for record in caplog.records
        if getattr(record, "event", "") == "dashboard_login_refused"
    ]
    assert len(texts) == checked
    text = texts[0]
    assert "'eve\\n'" in text
    assert "10.0.0.9" in text


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"--port {port}: no server can listen there"):
            serve(lambda *_: [], "127.0.0.1", port, print)


@pytest.mark.parametrize(
    ("removes_path", "origin"),
    # Browsers spell each of them as the first one.
    [(True, "https://example.com/ops/dq/"), (False, "https://Example.com:443/ops/dq")],
)
def test_a_dashboard_below_a_path_of_a_proxy(
    web: Web, removes_path: bool, origin: str, tmp_path: Path
) -> None:
    passwords = password_file(tmp_path, f"eve:{hash_password('word')}\n")
    url = web("--allow-changes", "--auth", str(passwords), "--origin", origin)
    common = {"Host": "example.com", "Authorization": basic("eve:word")}
    below = "" if removes_path else "/ops/dq"
    page = status, text, _ = ask(url, f"{below}/tenant/?queue=push&tenant=a", **common)
    assert status == 200
    addresses = re.findall(r'(?:href|src|action)="(/[^"]*)"', text)
    assert len(addresses) > 10
    assert [each for each in addresses if not each.startswith("/ops/dq/")] == []
    cookie, body, given = form_of(page)
    assert "Path=/ops/dq;" in cookie
    given |= {**common, "Origin": "https://example.com"}
    status, _, headers = ask(url, f"{below}/tenant/pause/", "POST", body, **given)
    assert (status, headers["Location"].startswith("/ops/dq/tenant/?")) == (302, True)
    (script,) = (each for each in addresses if "dashboard.js" in each)
    assert ask(url, below + script.removeprefix("/ops/dq"), **common)[0] == 200


@pytest.mark.parametrize(
    "origin", ["dash.example", "https://", "https://dash.example/dq?a=b", "https://dash.example//", "ftp://a"]
)
def test_an_origin_has_a_scheme_and_a_host(origin: str) -> None:
    with pytest.raises(ConfigurationError, match="give a scheme and a host"):
        check_origin(origin)


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("http://Dash.example:80", "http://dash.example"),
        ("https://[::1]:443", "https://[::1]"),
        ("https://dash.example:8443", "https://dash.example:8443"),
        ("http://dash.example:443", "http://dash.example:443"),
    ],
)
def test_an_origin_is_spelled_as_browsers_send_it(given: str, origin: str) -> None:
    assert check_origin(f"{given}/Ops") == (origin, "/Ops")


def test_a_name_with_two_addresses_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def two(host: str, port: int, *args: Any, **options: Any) -> list[Any]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{each}", int(port))) for each in (1, 2)
        ]

    monkeypatch.setattr(socket, "getaddrinfo", two)

    def ready(url: str) -> None:
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2].rstrip("/")))):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        serve(lambda *_: [], "localhost", 0, ready)


def refused(*words: str) -> str:
    """Run the command, which fails; return its output."""
    return run_dq(make_app("dq-redis://127.0.0.1:1/0"), "web", *words, status=1).output


def in_project(program: str, **settings: Any) -> str:
    """Run a program in a Django project with these settings besides the usual ones."""
    text = f"""
import django
from django.conf import settings
settings.configure(**{{
    "INSTALLED_APPS": ["celery_dq.contrib.django"],
    "SECRET_KEY": "x",
    "CELERY_DQ_APP": "tests.dashboard.shop:app",
    "MIGRATION_MODULES": {{"admin": None, "auth": None, "contenttypes": None, "sessions": None}},
    "DATABASES": {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}}},
    **{settings!r},
}})
django.setup()
from django.core.management import call_command
{program}
"""
    done = run_python("-c", text)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_model_of_the_permissions_has_its_migration_and_no_table() -> None:
    printed = in_project(
        "call_command('makemigrations', '--check', '--dry-run')\n"
        "call_command('migrate', verbosity=0)\n"
        "from django.db import connection\n"
        "print(connection.introspection.table_names())"
    )
    assert "No changes detected" in printed
    assert "celery_dq_dashboard" not in printed


def test_the_admin_links_to_the_dashboard() -> None:
    apps = ["django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes"]
    apps += ["django.contrib.messages", "django.contrib.sessions", "celery_dq.contrib.django"]
    middleware = [
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ]
    processors = [
        f"django.{each}"
        for each in (
            "template.context_processors.request",
            "contrib.auth.context_processors.auth",
            "contrib.messages.context_processors.messages",
        )
    ]
    templates = [
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "APP_DIRS": True,
            "OPTIONS": {"context_processors": processors},
        }
    ]
    printed = in_project(
        "call_command('migrate', verbosity=0, run_syncdb=True)\n"
        "from django.contrib.auth.models import User, Permission\n"
        "from django.test import Client\n"
        "for permissions in ([], ['view_queues']):\n"
        "    user = User.objects.create_user(f'u{len(permissions)}', is_staff=True)\n"
        "    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))\n"
        "    client = Client()\n"
        "    client.force_login(user)\n"
        "    page = client.get('/admin/').content.decode()\n"
        "    answer = client.get('/admin/celery_dq/dashboard/')\n"
        "    print('/admin/celery_dq/dashboard/' in page, answer.status_code, answer.get('Location'))\n"
        "for path in ('add', '1/change', '1/history', '1/delete'):\n"
        "    print(client.get(f'/admin/celery_dq/dashboard/{path}/').status_code)\n"
        "from django.contrib import admin\n"
        "from django.test import override_settings\n"
        "from django.urls import path\n"
        "with override_settings(ROOT_URLCONF=(path('admin/', admin.site.urls),)):\n"
        "    page = client.get('/admin/').content.decode()\n"
        "    print('/dashboard/' in page, client.get('/admin/celery_dq/dashboard/').status_code)\n"
        "for every in (False, True):\n"
        "    call_command('dumpdata', 'celery_dq', use_base_manager=every)\n",
        INSTALLED_APPS=apps,
        MIDDLEWARE=middleware,
        TEMPLATES=templates,
        ROOT_URLCONF="tests.dashboard.admin_urls",
        ALLOWED_HOSTS=["testserver"],
    )
    assert printed.replace("[]", "[]\n").split() == [
        *("False", "403", "None", "True", "302", "/dq/"),
        *("403", "302", "302", "403", "False", "403", "[]", "[]"),
    ]
