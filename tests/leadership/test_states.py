"""The elector reacts to a broken or expired ZooKeeper session at once, and not at its next renewal.

Its clock is frozen, so that no renewal is due and trust never ends by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from celery_dq.clock import ManualClock
from celery_dq.leadership.career import Phase, Term
from celery_dq.leadership.elector import LeaderElector
from celery_dq.leadership.zookeeper_election import ZooKeeperElection
from celery_dq.testing.waiting import wait_until
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.znodes import LeadershipNodes
from celery_dq.zookeeper.session import Session
from tests.chaos.proxy import Proxy
from tests.curator.expiry import expire
from tests.leadership.election_harness import Work


class Elected(NamedTuple):
    elector: LeaderElector
    session: Session
    proxy: Proxy
    work: Work

    def term(self) -> Term:
        term = wait_until(lambda: self.elector.term)
        assert term is not None
        return term


@pytest.fixture
def elected(zookeeper: ZooKeeperServer, hosts: str) -> Iterator[Elected]:
    proxy = Proxy(zookeeper.port).start()
    session = Session(f"127.0.0.1:{proxy.port}/{hosts.partition('/')[2]}", timeout_s=15)
    work = Work()
    election = ZooKeeperElection(session, LeadershipNodes("online", "ledger"), "w")
    elector = LeaderElector(election, work, clock=ManualClock())
    elector.open()
    yield Elected(elector, session, proxy, work)
    proxy.restore()
    work.let_go.set()
    elector.close(30)
    session.close()
    proxy.stop()


def test_nothing_starts_while_the_connection_is_broken(elected: Elected) -> None:
    term = elected.term()
    wait_until(lambda: term.is_firm)
    elected.proxy.black_hole()  # so that the connection cannot be restored at once
    elected.proxy.sever()
    wait_until(lambda: not term.is_firm)
    assert term.is_trusted
    elected.proxy.restore()
    wait_until(lambda: term.is_firm)
    assert elected.elector.term is term


def test_a_term_ends_with_its_session(elected: Elected) -> None:
    term = elected.term()
    wait_until(lambda: term.is_firm)
    expire(elected.session)
    wait_until(lambda: term.phase in (Phase.FALLEN, Phase.OVER))
    assert "session" in term.reason
    assert elected.work.let_go.wait(30)
    wait_until(lambda: elected.term().token == 2 and elected.term().is_firm)


def test_a_fall_that_others_notice_is_not_slept_through(elected: Elected) -> None:
    term = elected.term()
    wait_until(lambda: term.is_firm)
    term.fall("the broker does not know this term")
    assert elected.work.let_go.wait(30)
    wait_until(lambda: elected.term().token == 2)
