"""A session leaves a server that has stopped to answer, however often requests are sent to it."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from celery_dq.curator.queue import DistributedQueue
from celery_dq.errors import ZooKeeperUnreachable
from celery_dq.leadership.zookeeper_election import ZooKeeperElection
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.znodes import LeadershipNodes
from celery_dq.zookeeper.session import Session, SessionState
from celery_dq.zookeeper.transaction import ask_all
from tests.chaos.proxy import Proxy
from tests.curator.expiry import break_connection

NODES = LeadershipNodes("online", "ledger")


@pytest.fixture
def doors(zookeeper: ZooKeeperServer) -> Iterator[list[Proxy]]:
    """Two proxies to one server; a client sees them as two servers."""
    made = [Proxy(zookeeper.port).start() for _ in range(2)]
    yield made
    for each in made:
        each.stop()


def through(doors: list[Proxy], hosts: str) -> str:
    return ",".join(f"127.0.0.1:{door.port}" for door in doors) + "/" + hosts.partition("/")[2]


def door_of(session: Session, doors: list[Proxy]) -> Proxy:
    """Return the proxy that the session uses now."""
    port = session.open()._connection._socket.getpeername()[1]
    return next(door for door in doors if door.port == port)


def test_requests_that_get_no_answer_do_not_keep_a_dead_server(doors: list[Proxy], hosts: str) -> None:
    """kazoo counts each sent request as a sign of life, whether it is answered or not."""
    with closing(Session(through(doors, hosts), timeout_s=6)) as session:
        session.open()
        hung = door_of(session, doors)
        hung.black_hole()

        def answered() -> bool:
            # Send requests more often than kazoo would send pings.
            with contextlib.suppress(ZooKeeperUnreachable):
                return session.ask(lambda client: client.exists_async("/"), 0.1) is not None
            return False

        wait_until(answered, 30)
        assert door_of(session, doors) is not hung


def test_a_standby_whose_server_hangs_is_elected_through_another_one(doors: list[Proxy], hosts: str) -> None:
    leading, standing = Session(hosts, timeout_s=6), Session(through(doors, hosts), timeout_s=6)
    leader, standby = (ZooKeeperElection(session, NODES, "w") for session in (leading, standing))
    with closing(standing), closing(leading):
        assert leader.become_candidate()
        leader.accept(0, 0.0)
        assert not standby.become_candidate()
        door_of(standing, doors).black_hole()
        leader.resign(clean=True)

        def stands_first() -> bool:
            with contextlib.suppress(ZooKeeperUnreachable):
                return standby.become_candidate()
            return False

        wait_until(stands_first, 30)
        assert standby.accept(0, 0.0).token == 2


def test_a_leader_that_gets_no_answers_loses_its_session(doors: list[Proxy], hosts: str) -> None:
    """Its requests arrive: each new handshake would keep the session alive, and no candidate could lead."""
    leading, standing = Session(through(doors[:1], hosts), timeout_s=2), Session(hosts, timeout_s=6)
    leader, standby = (ZooKeeperElection(session, NODES, "w") for session in (leading, standing))
    states: list[SessionState] = []
    leading.add_listener(states.append)
    try:
        assert leader.become_candidate()
        leader.accept(0, 0.0)
        assert not standby.become_candidate()
        doors[0].hold_answers()
        wait_until(standby.become_candidate, 30)
        assert standby.accept(0, 0.0).token == 2
        assert SessionState.LOST in states
        doors[0].restore()
        assert not leader.become_candidate()
    finally:
        doors[0].restore()
        leading.close()
        standing.close()


def test_a_server_that_accepts_and_reports_nothing_does_not_hold_up_the_others(
    doors: list[Proxy], hosts: str
) -> None:
    """kazoo alone would wait for the mute server for half of the session, because there are two servers."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        door, chroot = doors[0], hosts.partition("/")[2]
        with closing(
            Session(f"127.0.0.1:{door.port},127.0.0.1:{mute.getsockname()[1]}/{chroot}", timeout_s=24)
        ) as session:
            session.open(10)
            received: list[SessionState] = []
            session.add_listener(received.append)
            # In one of the two attempts, the mute server comes first.
            door.sever()
            wait_until(lambda: received == [SessionState.SUSPENDED, SessionState.CONNECTED], 10)


def test_the_server_that_was_left_last_is_tried_last(doors: list[Proxy], hosts: str) -> None:
    session = Session(through(doors, hosts), timeout_s=15)
    received: list[SessionState] = []
    with closing(session):
        session.open()
        session.add_listener(received.append)
        for _ in range(8):
            left = door_of(session, doors)
            del received[:]
            break_connection(session)
            wait_until(lambda: received == [SessionState.SUSPENDED, SessionState.CONNECTED])
            assert door_of(session, doors) is not left


@pytest.fixture
def forgetful(own_zookeeper: ZooKeeperServer) -> ZooKeeperServer:
    """A server with some changes that it will lose."""
    with closing(Session(own_zookeeper.hosts, timeout_s=4)) as session:
        ask_all(session, lambda client: [client.create_async(f"/{number}") for number in range(30)], 10)
    return own_zookeeper


def test_a_server_that_was_rebuilt_is_used_again(forgetful: ZooKeeperServer) -> None:
    """A rebuilt server refuses clients that have seen later changes than its own."""
    session = Session(f"{forgetful.hosts}/shop/inside", timeout_s=2)
    election = ZooKeeperElection(session, NODES, "w")
    received: list[SessionState] = []
    with closing(session):
        assert election.become_candidate()
        election.accept(0, 0.0)
        session.add_listener(received.append)
        forgetful.kill()
        shutil.rmtree(forgetful.folder / "data")
        forgetful.restart()

        def elected() -> int:
            with contextlib.suppress(OSError):
                if election.become_candidate():
                    return election.accept(6, 0.0).token
            return 0

        assert wait_until(elected, 30) == 7
        assert SessionState.LOST in received


def test_a_server_that_was_restored_from_a_backup_is_used_again(
    own_zookeeper: ZooKeeperServer,
) -> None:
    seen: list[object] = []
    session = Session(f"{own_zookeeper.hosts}/shop", timeout_s=2)
    data, backup = own_zookeeper.folder / "data", own_zookeeper.folder / "backup"
    producer = DistributedQueue(session, "/mail")
    with closing(session):
        session.open()
        own_zookeeper.kill()
        shutil.copytree(data, backup)
        own_zookeeper.restart()
        consumer = DistributedQueue(session, "/mail", lock_path="/locks", consumer=seen.append).start()
        producer.put_each(list(range(30)), timeout_s=30)
        wait_until(lambda: len(seen) == 30)
        own_zookeeper.kill()
        shutil.rmtree(data)
        backup.rename(data)
        own_zookeeper.restart()

        def is_put() -> bool:
            # The producer's node is lost with the backup. The producer cannot tell whether the first attempt
            # was carried out, and raises.
            with contextlib.suppress(ZooKeeperUnreachable):
                producer.put("after", timeout_s=10)
                return True
            return False

        wait_until(is_put)
        wait_until(lambda: "after" in seen)
        consumer.close()
        producer.close()
