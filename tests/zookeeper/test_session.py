"""The ZooKeeper session, on a real server."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from contextlib import closing
from typing import Any

import pytest
from kazoo.exceptions import NoNodeError

from celery_dq.errors import ConfigurationError, ZooKeeperUnreachable
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.zookeeper.session import Session, SessionState
from tests.children import in_child
from tests.curator.expiry import break_connection
from tests.zookeeper.removal import delete_chroot


def test_needs_hosts() -> None:
    with pytest.raises(ConfigurationError, match="names no ZooKeeper"):
        Session("")


def test_makes_its_chroot_and_knows_the_negotiated_timeout(hosts: str) -> None:
    with closing(Session(f"{hosts}/deeper", timeout_s=100)) as session:
        client = session.open()
        assert client.get_children("/") == []
        # The test servers grant no longer session.
        assert session.timeout_s == 60
        assert session.id is not None
    assert session.state is SessionState.CLOSED


def test_reports_listeners_and_reconnects_after_a_drop(hosts: str) -> None:
    session = Session(hosts, timeout_s=15)
    received: list[SessionState] = []
    session.add_listener(received.append)
    with closing(session):
        session.open()
        before = session.id
        break_connection(session)
        wait_until(
            lambda: received == [SessionState.CONNECTED, SessionState.SUSPENDED, SessionState.CONNECTED]
        )
        assert session.id == before
    assert received[-1] is SessionState.CLOSED


def test_a_paused_server_is_noticed_and_nothing_is_queued_for_it(own_zookeeper: ZooKeeperServer) -> None:
    session = Session(own_zookeeper.hosts, timeout_s=1.5)
    try:
        session.open()
        own_zookeeper.pause()
        wait_until(lambda: session.state is SessionState.SUSPENDED)
        with pytest.raises(ZooKeeperUnreachable, match="did not answer within 0.1 s"):
            session.ask(lambda client: client.create_async("/late", b""), 0.1)
        own_zookeeper.resume()

        def late() -> list[Any]:
            # The session has ended, perhaps during the request; the request is then sent in the next session.
            with contextlib.suppress(ZooKeeperUnreachable):
                return [session.ask(lambda client: client.exists_async("/late"), 5)]
            return []

        assert wait_until(late) == [None]
    finally:
        own_zookeeper.resume()
        session.close()


def test_an_outage_costs_the_log_one_warning_and_not_one_for_each_attempt(
    own_zookeeper: ZooKeeperServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "kazoo")
    # Long, because a client that is away for some of it warns that it forgets the latest change.
    with closing(Session(own_zookeeper.hosts, timeout_s=30)) as session:
        session.open()
        own_zookeeper.kill()
        wait_until(lambda: sum("Connection dropped" in text for text in caplog.messages) >= 4)
        own_zookeeper.restart()
        wait_until(lambda: session.state is SessionState.CONNECTED)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [vars(record).get("event") for record in warnings] == [
        "zookeeper_outage_began",
        "zookeeper_outage_over",
    ]
    began = warnings[0].getMessage()
    assert own_zookeeper.hosts in began
    assert "Connection refused" in began
    assert "Until one answers, requests fail" in began, "the consequence"
    assert "Check that the servers run" in began, "the remedy"


def test_an_outage_of_names_that_do_not_resolve_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kazoo")
    with closing(Session("no-such-host.invalid:2181", timeout_s=2)) as session:
        with pytest.raises(ZooKeeperUnreachable):
            session.open(0.0)
        wait_until(lambda: sum("Cannot resolve" in text for text in caplog.messages) >= 3)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "no-such-host.invalid:2181" in warnings[0]
    assert "no host name resolves" in warnings[0]


def test_a_host_that_drops_packets_costs_two_seconds_at_most(zookeeper: ZooKeeperServer) -> None:
    # A full backlog: further SYNs are dropped, as by a firewall.
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(hole.getsockname())
        session = Session(f"127.0.0.1:{hole.getsockname()[1]}", timeout_s=30)
        try:
            began = time.monotonic()
            with pytest.raises(ZooKeeperUnreachable):
                session.open(0.5)
            assert time.monotonic() - began < 10
            client = session._state.get().client
            began = time.monotonic()
            with pytest.raises((client.handler.timeout_exception, TimeoutError)):
                client.handler.create_connection(hole.getsockname(), timeout=30)
            assert time.monotonic() - began < 10
        finally:
            session.close()
            for filler in fillers:
                filler.close()


def test_a_fork_gets_a_session_of_its_own(hosts: str) -> None:
    with closing(Session(hosts, timeout_s=15)) as session:
        session.open()
        ours = session.id

        def child() -> list[object]:
            inherited = session.state.value
            session.open()
            is_ours = session.id == ours
            session.close()
            return [inherited, is_ours]

        assert in_child(child) == ["closed", False]
        assert session.open().exists("/") is not None
        assert session.id == ours


def test_digest_credentials_protect_their_nodes(hosts: str) -> None:
    with closing(Session(hosts, timeout_s=15, auth=[("digest", "shop:secret")])) as ours:
        ours.ask(lambda client: client.create_async("/mine", b"x"), 30)
        assert ours.ask(lambda client: client.get_async("/mine"), 30)[0] == b"x"
        # A client without the password gets the error when the session is opened, and not at its first
        # request.
        for stranger in (Session(hosts), Session(hosts, auth=[("digest", "shop:wrong")])):
            with pytest.raises(ConfigurationError, match="denied access to the node: check auth and sasl"):
                stranger.open()
            assert stranger.state is SessionState.CLOSED


def test_a_folder_that_is_deleted_is_made_again(zookeeper: ZooKeeperServer, hosts: str) -> None:
    session = Session(f"{hosts}/shop", timeout_s=15)

    def created() -> bool:
        with contextlib.suppress(ZooKeeperUnreachable, NoNodeError):
            session.ask(lambda client: client.create_async("/mine", makepath=True), 30)
            return True
        return False

    with closing(session):
        for _ in range(2):
            wait_until(created)
            delete_chroot(zookeeper, hosts)
        wait_until(created)
