"""Credentials and TLS on real servers: SASL with a JAAS file, TLS with certificates of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from celery_dq.errors import ConfigurationError
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import Certificate, ZooKeeperServer, make_certificate
from celery_dq.zookeeper.session import Session, SessionState
from tests.workers import ROOT

LOGIN = {"mechanism": "DIGEST-MD5", "username": "shop", "password": "secret"}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Certificate, Certificate]:
    """The certificates of the server, which is valid for 127.0.0.1 only, and of its client."""
    folder = tmp_path_factory.mktemp("certificates")
    return make_certificate(folder, "server"), make_certificate(folder, "client")


@pytest.fixture(scope="module")
def tls_server(certificates: tuple[Certificate, Certificate]) -> Iterator[ZooKeeperServer]:
    with ZooKeeperServer(tick_ms=200, certificate=certificates[0], trusts=certificates[1]) as server:
        yield server


@pytest.fixture
def tls(certificates: tuple[Certificate, Certificate]) -> dict[str, Any]:
    """Correct TLS settings."""
    server, client = certificates
    return {
        "ca": str(server.certificate),
        "certfile": str(client.certificate),
        "keyfile": str(client.key),
    }


@pytest.fixture
def sasl_server() -> Iterator[ZooKeeperServer]:
    with ZooKeeperServer(tick_ms=200, users={"shop": "secret"}) as server:
        yield server


def refused(match: str, hosts: str, **credentials: Any) -> None:
    """Check that opening a session raises the reason long before its timeout, and leaves nothing open."""
    session = Session(hosts, timeout_s=15, **credentials)
    began = time.monotonic()
    with pytest.raises(ConfigurationError, match=match):
        session.open(30)
    assert time.monotonic() - began < 10
    assert session.state is SessionState.CLOSED


def works(session: Session) -> bool:
    with closing(session):
        session.ask(lambda client: client.create_async("/made-", b"", sequence=True), 30)
        return True


@pytest.mark.parametrize(
    ("credentials", "match"),
    [
        ({"auth": "digest"}, "list of .scheme, credential. pairs"),
        ({"auth": [("digest", "shop")]}, "'user:password'"),
        ({"sasl": {"username": "shop"}}, "no mechanism"),
        ({"tls": {"cafile": "x"}}, "'cafile'. is unknown: use ca,"),
        ({"tls": {"ca": "/nowhere"}}, "'/nowhere' cannot be read"),
        ({"tls": {"certfile": __file__}}, "needs tls.'keyfile'."),
    ],
)
def test_impossible_credentials_are_reported_before_a_connection(
    credentials: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Session("127.0.0.1:1", **credentials)


def test_sasl(sasl_server: ZooKeeperServer) -> None:
    hosts = sasl_server.hosts
    assert works(Session(f"{hosts}/shop", timeout_s=15, sasl=LOGIN))
    refused("refused the credentials", hosts, sasl={**LOGIN, "password": "wrong"})
    refused("serves no client without any: check sasl", hosts)
    refused("serves no client without any: check sasl", f"{hosts}/shop", auth=[("digest", "shop:secret")])


def test_a_changed_password_is_reported_to_the_next_caller(
    sasl_server: ZooKeeperServer,
) -> None:
    with closing(Session(sasl_server.hosts, timeout_s=15, sasl=LOGIN)) as session:
        session.open()
        sasl_server.users["shop"] = "changed"
        sasl_server.restart()
        wait_until(lambda: session.state is SessionState.LOST, 60)
        with pytest.raises(ConfigurationError, match="refused the credentials"):
            session.ask(lambda client: client.exists_async("/"), 30)
        # The session is not stuck: with the correct password, the next request works.
        sasl_server.users["shop"] = "secret"
        sasl_server.restart()
        assert works(session)


def test_tls_with_certificates_on_both_sides(tls_server: ZooKeeperServer, tls: dict[str, Any]) -> None:
    assert works(Session(f"{tls_server.tls_hosts}/shop", timeout_s=15, tls=tls))


def test_tls_checks_the_host_name(tls_server: ZooKeeperServer, tls: dict[str, Any]) -> None:
    named = tls_server.tls_hosts.replace("127.0.0.1", "localhost")
    refused("not valid for 'localhost'", named, tls=tls)
    assert works(Session(named, timeout_s=15, tls={**tls, "check_hostname": False}))


def test_tls_trusts_no_server_by_default(tls_server: ZooKeeperServer, tls: dict[str, Any]) -> None:
    refused("is not valid .self-signed", tls_server.tls_hosts, tls={**tls, "ca": None})


def test_tls_reports_that_a_certificate_is_wanted(tls_server: ZooKeeperServer, tls: dict[str, Any]) -> None:
    refused("if the server wants a certificate", tls_server.tls_hosts, tls={"ca": tls["ca"]})


def test_a_server_that_is_right_is_enough(
    tls_server: ZooKeeperServer, tls: dict[str, Any], certificates: tuple[Certificate, Certificate]
) -> None:
    wrong_name = tls_server.tls_hosts.replace("127.0.0.1", "localhost")
    assert works(Session(f"{wrong_name},{tls_server.tls_hosts}", timeout_s=15, tls=tls))


@pytest.mark.parametrize("patched", ["gevent", "eventlet"])
def test_tls_in_a_green_process(patched: str, tls_server: ZooKeeperServer, tls: dict[str, Any]) -> None:
    patch = {"gevent": "import gevent.monkey; gevent.monkey.patch_all()", "eventlet": GREEN_EVENTLET}[patched]
    program = (
        f"{patch}\n"
        "from celery_dq.zookeeper.session import Session\n"
        f"session = Session({tls_server.tls_hosts!r}, timeout_s=15, tls={tls!r})\n"
        "client = session.open()\n"
        "assert session.ask(lambda client: client.exists_async('/'), 30) is not None\n"
        "print(type(client.handler).__mro__[1].__name__, flush=True)\n"
    )
    # The session is left open on purpose: the interpreter must exit cleanly with it.
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(ROOT)), *sys.path])},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == f"Sequential{patched.capitalize()}Handler"


GREEN_EVENTLET = "import eventlet; eventlet.monkey_patch()"
