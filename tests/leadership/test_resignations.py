"""A lost resignation is repeated with the same content, so that the successor waits for nothing."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from celery_dq.errors import ZooKeeperUnreachable
from celery_dq.keys import PartitionKeys
from celery_dq.leadership.elector import Election
from celery_dq.leadership.redis_election import RedisElection, load_scripts
from celery_dq.leadership.runner import Runner
from celery_dq.leadership.zookeeper_election import ZooKeeperElection
from celery_dq.testing.waiting import wait_until
from celery_dq.znodes import LeadershipNodes
from celery_dq.zookeeper.session import Session
from tests.leadership.recorded_careers import Diary, Line

#: Longer than a test: a candidate without a resignation blocks the others.
SESSION_S = 60.0


class FrailSession(Session):
    """A session that loses a number of resignations or their answers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.loses: list[str] = []

    def ask(self, request: Callable[[Any], Any], timeout_s: float) -> Any:
        return super().ask(lambda client: request(FrailClient(client, self)), timeout_s)


class FrailClient:
    def __init__(self, client: Any, session: FrailSession) -> None:
        self._client, self._session = client, session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def transaction(self) -> Any:
        batch, session = self._client.transaction(), self._session
        delete, commit_async = batch.delete, batch.commit_async

        def commit() -> Any:
            how = session.loses.pop(0)
            if how == "answer":
                commit_async().get(timeout=30)
            raise ZooKeeperUnreachable(f"the {how} is lost")

        def deleting(*args: Any) -> None:
            delete(*args)
            if session.loses:
                batch.commit_async = commit

        batch.delete = deleting
        return batch


class FrailRedis:
    """A Redis client with the same faults."""

    def __init__(self, url: str) -> None:
        self._client: Any = redis.Redis.from_url(url)
        self.loses: list[str] = []
        # The script is loaded first, so that a resignation is one command.
        self._client.script_load(load_scripts()["resign"].source)
        self.close = self._client.close

    def execute_command(self, *args: Any) -> Any:
        if not self.loses or load_scripts()["resign"].sha1 not in args:
            return self._client.execute_command(*args)
        how = self.loses.pop(0)
        if how == "answer":
            self._client.execute_command(*args)
        raise redis.ConnectionError(f"the {how} is lost")


Made = tuple[Callable[[], Any], Callable[[Any], Election]]


def by_zookeeper(request: pytest.FixtureRequest) -> Made:
    hosts = request.getfixturevalue("hosts")

    def make(session: Any) -> Election:
        return ZooKeeperElection(session, LeadershipNodes("online", "ledger"), "w")

    return lambda: FrailSession(hosts, timeout_s=SESSION_S), make


def by_redis(request: pytest.FixtureRequest) -> Made:
    url = request.getfixturevalue("redis_url")

    def make(client: Any) -> Election:
        return RedisElection(client, PartitionKeys("online", "ledger"), "w", SESSION_S)

    return lambda: FrailRedis(url), make


@contextmanager
def leader_and_next(
    request: pytest.FixtureRequest, by: Callable[[pytest.FixtureRequest], Made], inbox: queue.Queue[str]
) -> Iterator[tuple[Any, Runner[str], Election]]:
    """Run a leader; yield its connection, the leader, and the candidate that follows."""
    connect, make = by(request)
    wire, other, lines = connect(), connect(), list[Line]()
    runner = Runner(
        Diary(lines, "ann"), make(wire), source=lambda timeout_s: inbox.get(timeout=timeout_s)
    ).open()
    try:
        wait_until(lambda: lines, 30)
        successor = make(other)
        assert not successor.become_candidate()
        yield wire, runner, successor
        assert not wire.loses
        assert successor.accept(0, 0.0)[:2] == (2, True)
    finally:
        runner.close(30)
        wire.close()
        other.close()


@pytest.mark.parametrize("loses", ["request", "answer"])
@pytest.mark.parametrize("by", [by_zookeeper, by_redis])
def test_a_candidate_that_leaves_repeats_its_report_until_the_answer(
    by: Callable[[pytest.FixtureRequest], Made], loses: str, request: pytest.FixtureRequest
) -> None:
    with leader_and_next(request, by, queue.Queue()) as (wire, runner, successor):
        wire.loses = [loses]
        assert runner.close(30)
        assert not wire.loses
        assert successor.become_candidate()


def test_a_leader_that_resigns_reports_the_same_at_every_try(request: pytest.FixtureRequest) -> None:
    inbox: queue.Queue[str] = queue.Queue()
    with leader_and_next(request, by_zookeeper, inbox) as (wire, _, successor):
        # One is lost at the end of the term, and one at the next candidacy.
        wire.loses = ["request"] * 2
        inbox.put("stop")
        wait_until(successor.become_candidate, 30)
