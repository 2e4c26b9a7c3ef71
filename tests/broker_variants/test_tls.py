"""``dq-rediss://``: encrypted, and verified if configured."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection

from celery_dq.app.checks.doctor import check_server
from celery_dq.errors import ConfigurationError
from celery_dq.testing.servers import RedisServer
from celery_dq.wiring import register_transports
from tests.broker_variants.certificates import Authority
from tests.broker_variants.conftest import OpenCeleryApp, assert_refused, run_tasks
from tests.broker_variants.tls import TlsRedis, tls_cluster, tls_redis
from tests.brokers import BROKERS
from tests.conformance.celery_app import CeleryApp
from tests.conformance.kombu_queue import KombuQueue

UNVERIFIED = r"(?i)certificate verify failed"


@pytest.fixture(scope="module")
def authority(files: Path) -> Authority:
    return Authority(files / "ours")


@pytest.fixture(scope="module")
def stranger(files: Path) -> Authority:
    """An authority that signed none of the used certificates."""
    return Authority(files / "stranger")


@pytest.fixture(scope="module")
def encrypted(authority: Authority) -> Iterator[TlsRedis]:
    with tls_redis(authority) as server:
        yield server


def verifying(authority: Authority) -> dict[str, object]:
    return {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": str(authority.certificate)}


def exchange(connection: Connection) -> None:
    """Publish and consume many messages, more than fit one TLS record."""
    room = KombuQueue(connection, "encrypted")
    bodies = [f"{number}:" + "x" * 1000 for number in range(60)]
    room.publish(*bodies)
    room.consume(ack=True)
    assert room.drain(len(bodies)) == bodies


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_worker_runs_tasks_over_tls(
    encrypted: TlsRedis, authority: Authority, open_celery_app: OpenCeleryApp, pool: str
) -> None:
    url = f"dq-rediss://localhost:{encrypted.port}/0"
    query = f"?ssl_cert_reqs=required&ssl_ca_certs={authority.certificate}"
    run_tasks(open_celery_app(url + query), pool)


def test_broker_use_ssl_sets_the_trusted_authority(
    encrypted: TlsRedis, authority: Authority, open_celery_app: OpenCeleryApp
) -> None:
    url = f"dq-rediss://localhost:{encrypted.port}/1"
    trust = {"ssl_cert_reqs": "required", "ssl_ca_certs": str(authority.certificate)}
    run_tasks(open_celery_app(url, broker_use_ssl=trust), "solo")


def test_a_wrong_authority_is_a_clear_error(encrypted: TlsRedis, stranger: Authority) -> None:
    url = f"dq-rediss://localhost:{encrypted.port}/2"
    assert_refused(url, UNVERIFIED, ssl=verifying(stranger))


def test_the_doctor_names_the_setting_of_a_certificate_that_is_not_trusted(
    encrypted: TlsRedis, stranger: Authority, redis_server: RedisServer
) -> None:
    url = f"dq-rediss://localhost:{encrypted.port}/0"
    place = CeleryApp(
        BROKERS["dq"], redis_server, "encrypted", broker_url=url, broker_use_ssl=verifying(stranger)
    )
    try:
        (found,) = [each for each in check_server(place.app) if each.code == "E011"]
    finally:
        place.close()
    assert "certificate verify failed" in found.problem
    assert found.remedy.startswith("Mend broker_use_ssl")


def test_a_certificate_for_another_host_is_a_clear_error(authority: Authority) -> None:
    trust = {**verifying(authority), "ssl_check_hostname": True}
    with tls_redis(authority, purpose="elsewhere") as server:
        assert_refused(f"dq-rediss://localhost:{server.port}/0", r"(?i)hostname mismatch", ssl=trust)


@pytest.mark.parametrize("scheme", ["dq-rediss", "dq-redis"])
def test_true_means_the_systems_authorities(encrypted: TlsRedis, scheme: str) -> None:
    # The authorities of the system did not sign the test's certificate.
    assert_refused(f"{scheme}://localhost:{encrypted.port}/0", UNVERIFIED, ssl=True)


@pytest.mark.parametrize("scheme", ["dq-rediss", "dq-redis"])
def test_true_compares_the_name_of_the_host(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    # Releases of redis-py before 6 do so only on request.
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    with tls_redis(authority, purpose="elsewhere") as server:
        assert_refused(f"{scheme}://localhost:{server.port}/0", r"(?i)hostname mismatch", ssl=True)


@pytest.mark.parametrize("options", [None, {}])
def test_without_settings_the_connection_is_encrypted_unverified_and_warned_of(
    encrypted: TlsRedis, caplog: pytest.LogCaptureFixture, options: Any
) -> None:
    # The same as kombu's rediss://, so that a switch needs a changed scheme only.
    with (
        caplog.at_level(logging.WARNING),
        Connection(f"dq-rediss://localhost:{encrypted.port}/3", ssl=options) as connection,
    ):
        exchange(connection)
    assert "ssl_ca_certs" in caplog.text


def test_plain_text_to_an_encrypted_port_is_an_error_at_once(encrypted: TlsRedis) -> None:
    assert_refused(f"dq-redis://localhost:{encrypted.port}/0")


def test_a_client_certificate_is_shown(authority: Authority, stranger: Authority) -> None:
    client = authority.sign("client")
    shown = {
        **verifying(authority),
        "ssl_certfile": str(client.certificate),
        "ssl_keyfile": str(client.key),
    }
    with tls_redis(authority, client_certificates=True) as server:
        url = f"dq-rediss://localhost:{server.port}/0"
        with Connection(url, ssl=shown) as connection:
            exchange(connection)
        assert_refused(url, ssl=verifying(authority))


def test_a_worker_connects_again_over_tls(
    encrypted: TlsRedis, authority: Authority, open_celery_app: OpenCeleryApp
) -> None:
    url = f"dq-rediss://localhost:{encrypted.port}/4?ssl_cert_reqs=required"
    place = open_celery_app(f"{url}&ssl_ca_certs={authority.certificate}")
    with place.worker("prefork"):
        assert place.send("add", 1, 1).get(timeout=30) == 2
        encrypted.server.ask("CLIENT", "KILL", "TYPE", "normal")
        assert place.send("add", 2, 2).get(timeout=60) == 4


@pytest.fixture(scope="module")
def encrypted_cluster(authority: Authority) -> Iterator[str]:
    with tls_cluster(authority) as url:
        yield url


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_runs_tasks_on_an_encrypted_cluster(
    encrypted_cluster: str, authority: Authority, redis_server: RedisServer, pool: str
) -> None:
    queue = f"encrypted-{pool}"
    trust = {
        "ssl_cert_reqs": "required",
        "ssl_ca_certs": str(authority.certificate),
        "ssl_check_hostname": True,
    }
    place = CeleryApp(
        BROKERS["cluster"],
        redis_server,
        queue,
        broker_url=encrypted_cluster,
        broker_use_ssl=trust,
        dq_queues={queue: {"partitions": 6}},
    )
    try:
        run_tasks(place, pool)
        # These ask each node on a connection of its own.
        texts = {finding.code: finding.problem for finding in check_server(place.app)}
        assert not [code for code in texts if code.startswith("E")], texts
        nodes = encrypted_cluster.partition("://")[2].split(",")
        assert sum(f"{node} " in texts["I032"] for node in nodes) == 3, "masters by their encrypted ports"
    finally:
        place.close()


@pytest.mark.parametrize("trusted", ["stranger", "system"])
def test_a_wrong_authority_is_a_clear_error_on_a_cluster(
    encrypted_cluster: str, stranger: Authority, trusted: str
) -> None:
    trust = verifying(stranger) if trusted == "stranger" else True
    assert_refused(encrypted_cluster, UNVERIFIED, ssl=trust)


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("ssl_pasword", "did you mean 'ssl_password'"),
        ("ca_certs", "did you mean 'ssl_ca_certs'"),  # as with RabbitMQ
        ("xyz", "remove it"),
    ],
)
@pytest.mark.parametrize("scheme", ["dq-rediss", "dq-redis", "dq-sentinel", "dq-rediscluster"])
def test_an_unknown_option_is_a_clear_error_before_the_first_connection(
    scheme: str, option: str, remedy: str
) -> None:
    register_transports()
    connection = Connection(f"{scheme}://127.0.0.1:1", ssl={option: "secret"})
    with pytest.raises(
        ConfigurationError, match=f"broker_use_ssl has no option '{option}'; {remedy}"
    ) as failed:
        connection.connect()
    assert "secret" not in str(failed.value)
