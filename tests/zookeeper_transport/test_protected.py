"""A ZooKeeper server with TLS, SASL and ACLs, from the view of a user of Celery."""

from __future__ import annotations

import os
import signal
import ssl
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from celery import chord
from kazoo.exceptions import NoAuthError
from kazoo.security import make_acl, make_digest_acl
from kombu import Connection, Exchange, Producer, Queue

from celery_dq.app.api.api import dq_of
from celery_dq.errors import AccessDenied, ConfigurationError, DeliveriesExhausted
from celery_dq.testing.servers import RedisServer
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer, make_certificate
from celery_dq.transport.zookeeper.record import count_of
from celery_dq.znodes import BrokerNodes
from celery_dq.zookeeper.session import Session
from tests.brokers import BROKERS
from tests.conformance.celery_app import CeleryApp
from tests.conformance.kombu_queue import KombuQueue
from tests.zookeeper_transport.kinds import transport_of

WAIT = 60
NODES = BrokerNodes("online")
LOGIN = {"mechanism": "DIGEST-MD5", "username": "shop", "password": "secret"}


class Fortress(NamedTuple):
    """A server with TLS that serves only clients with a SASL login."""

    server: ZooKeeperServer
    authority: str
    stranger: str


@pytest.fixture(scope="module")
def fortress(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fortress]:
    folder = tmp_path_factory.mktemp("fortress")
    own, other = make_certificate(folder, "server"), make_certificate(folder, "other")
    with ZooKeeperServer(tick_ms=200, users={"shop": "secret"}, certificate=own) as server:
        yield Fortress(server, str(own.certificate), str(other.certificate))


@pytest.fixture
def folder() -> str:
    return f"t-{uuid4().hex[:12]}"


def settings(fortress: Fortress, folder: str, **changes: Any) -> dict[str, Any]:
    """Return correct settings in the form that a user writes."""
    return {
        "broker_url": f"dq-zookeeper://shop:secret@{fortress.server.tls_hosts}/{folder}",
        "broker_login_method": "DIGEST-MD5",
        "broker_use_ssl": {"ca_certs": fortress.authority},
        "broker_transport_options": {"session_timeout": 15},
        "dq_max_deliveries": 1,
        **changes,
    }


@pytest.fixture
def celery_app(
    fortress: Fortress,
    folder: str,
    redis_server: RedisServer,
    looker: Session,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[CeleryApp]:
    monkeypatch.setenv("C_FORCE_ROOT", "1")  # pickle needs this if the tests run as root
    broker = BROKERS["zookeeper"]
    broker.prepare()
    conf = {"accept_content": ["json", "pickle"], **settings(fortress, folder)}
    opened = CeleryApp(broker, redis_server, broker_port=fortress.server.port, **conf)
    yield opened
    opened.close()


@pytest.fixture
def looker(fortress: Fortress, folder: str) -> Iterator[Session]:
    """A session that looks at the nodes directly."""
    session = Session(f"{fortress.server.hosts}/{folder}", sasl=LOGIN)
    yield session
    session.close()


def test_a_worker_behind_tls_and_sasl(celery_app: CeleryApp, looker: Session) -> None:
    nodes = NODES.queue(celery_app.queue)
    with celery_app.worker("prefork", concurrency=1, conf={"worker_prefetch_multiplier": 4}) as worker:
        # Tasks run, with a chord over the result backend, and remote control works in both directions.
        assert celery_app.send("add", 2, 3).get(timeout=WAIT) == 5
        header = [celery_app.signature("add", number, 1) for number in range(3)]
        assert chord(header)(celery_app.signature("total")).get(timeout=WAIT) == 6
        assert celery_app.ask("ping") == {"ok": "pong"}
        # A task that kills its process every time becomes a dead letter, and its result is an error.
        died = celery_app.send("die", key := uuid4().hex, serializer="pickle")
        with pytest.raises(DeliveriesExhausted, match="dead-lettered after 1 deliveries"):
            died.get(timeout=WAIT)
        assert len(celery_app.witness.reports(f"attempt:{key}")) == 1
        (letter,) = wait_until(dq_of(celery_app.app).dead_letters[celery_app.queue].list, WAIT)
        assert (letter.id, letter.reason, letter.deliveries) == (died.id, "max_deliveries", 1)
        # A warm shutdown releases messages that were not started, and does not count them as lost consumers.
        held = celery_app.send("hold_late", key)
        celery_app.witness.wait(f"started:{key}")
        waiting = [celery_app.send("hold_late", uuid4().hex) for _ in range(2)]
        client = looker.open()
        wait_until(lambda: len(client.get_children(nodes.locks)) == 3, WAIT)
        os.kill(worker.pid, signal.SIGTERM)
        worker.wait_for_log("Warm shutdown", WAIT)
        celery_app.witness.release(key)
        assert held.get(timeout=WAIT) == key
        wait_until(lambda: not worker.alive, WAIT)
    left = client.get_children(nodes.ready)
    assert [count_of(client.get(nodes.item(name))[1]).deliveries for name in left] == [0, 0]
    assert not any(each.ready() for each in waiting)


def open_to(fortress: Fortress, folder: str, **changes: Any) -> Connection:
    """Open a connection as Celery would."""
    given = settings(fortress, folder, **changes)
    return Connection(
        given["broker_url"],
        login_method=given["broker_login_method"],
        ssl=given["broker_use_ssl"],
        transport_options=given["broker_transport_options"],
    )


def test_an_error_is_reported_in_the_users_words_and_loses_nothing(fortress: Fortress, folder: str) -> None:
    with open_to(fortress, folder) as connection:
        KombuQueue(connection, "q").publish("precious")
    url = f"dq-zookeeper://shop:secret@{fortress.server.tls_hosts}/{folder}"
    by_name = url.replace("127.0.0.1", "localhost")
    tls = {"ca_certs": fortress.authority}
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"broker_use_ssl": {"ca_certs": fortress.stranger}}, r"check broker_use_ssl\['ca'\]"),
        ({"broker_use_ssl": {"ca_certs": "/nowhere"}}, r"broker_use_ssl\['ca'\] = '/nowhere' cannot be read"),
        ({"broker_use_ssl": True}, r"is not valid .self-signed.*check broker_use_ssl\['ca'\]"),
        ({"broker_url": by_name}, "not valid for 'localhost'.*host name"),
        ({"broker_url": url.replace("secret", "wrong")}, "credentials.*check .*broker_login_method"),
        ({"broker_login_method": None}, "serves no client without any: check broker_login_method"),
        ({"broker_url": url.replace("shop:secret@", "")}, "needs a username and a password"),
    ]
    for changes, match in refusals:
        with (
            open_to(fortress, folder, **changes) as wrong,
            pytest.raises(ConfigurationError, match=match) as refusal,
        ):
            Producer(wrong.channel()).publish("more", routing_key="q")
        assert "secret" not in str(refusal.value)
    unchecked = {**tls, "cert_reqs": ssl.CERT_NONE}
    with open_to(fortress, folder, broker_url=by_name, broker_use_ssl=unchecked) as connection:
        room = KombuQueue(connection, "q")
        room.consume(ack=True)
        assert room.drain(1, deadline=WAIT) == ["precious"]


@pytest.mark.logged_error("it refused the credentials")
def test_a_worker_with_a_wrong_password_ends_and_reports_why(celery_app: CeleryApp) -> None:
    wrong = celery_app.conf["broker_url"].replace("secret", "wrong")
    worker = celery_app.worker("solo", conf={"broker_url": wrong})
    try:
        worker.start()
        wait_until(lambda: not worker.alive, WAIT)
        assert worker.returncode != 0
        assert "it refused the credentials" in worker.log
        assert "broker_login_method" in worker.log
    finally:
        worker.discard()


def test_nodes_carry_the_acls_that_were_asked_for(zookeeper: ZooKeeperServer, folder: str) -> None:
    BROKERS["zookeeper"].prepare()
    owner = make_digest_acl("shop", "secret", all=True)
    world = make_acl("world", "anyone", read=True)
    options = {"session_timeout": 15, "acl": [owner, world]}
    with Connection(
        f"dq-zookeeper://shop:secret@{zookeeper.hosts}/{folder}", transport_options=options
    ) as connection:
        room = KombuQueue(connection, Queue("q", Exchange("x", type="direct"), routing_key="k"))
        room.publish("mine", exchange="x", routing_key="k")
        room.consume()
        room.drain(1, deadline=WAIT)
        # A stranger may read all nodes and change nothing.
        with closing(Session(f"{zookeeper.hosts}/{folder}")) as session:
            client = session.open()
            found = list(below(client, "/dq"))
            assert NODES.queue("q").item("").rstrip("/") in found
            assert any(path.startswith(NODES.queue("q").locks + "/") for path in found)
            # ZooKeeper hides the digests in ACLs from strangers.
            own = transport_of(connection).session.open()
            for path in found:
                assert sorted(own.get_acls(path)[0]) == sorted([owner, world]), path
            with pytest.raises(NoAuthError):
                client.delete(NODES.queue("q").item(client.get_children(NODES.queue("q").ready)[0]))
        with (
            Connection(f"dq-zookeeper://{zookeeper.hosts}/{folder}") as stranger,
            pytest.raises(AccessDenied, match="auth="),
        ):
            Producer(stranger.channel()).publish("theirs", routing_key="q")
        for message in room.received:
            message.ack()
        wait_until(lambda: room.count() == 0, WAIT)


def below(client: Any, path: str) -> Iterator[str]:
    """Yield `path` and all paths below it."""
    yield path
    for name in client.get_children(path):
        yield from below(client, f"{path}/{name}")
