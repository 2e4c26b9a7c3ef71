"""The shared state of beats in Redis and in ZooKeeper, with the same rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_dq.beat.schedule_store import (
    Known,
    LastRun,
    RedisScheduleStore,
    ScheduleStore,
    ZooKeeperScheduleStore,
    micros,
)
from celery_dq.errors import Fenced
from celery_dq.testing.zookeeper import ZooKeeperServer
from celery_dq.znodes import BeatNodes
from celery_dq.zookeeper.session import Session

START = datetime(2026, 3, 29, 0, 30, tzinfo=timezone.utc)
#: An entry may have any name.
NAME = "daily: report/|%s.*"


def known(**entries: datetime) -> dict[str, Known]:
    """Make entries whose last runs are all accepted."""
    return {name: Known(ran, datetime.max.replace(tzinfo=timezone.utc)) for name, ran in entries.items()}


def minutes(count: float) -> datetime:
    return START + timedelta(minutes=count)


@pytest.fixture(params=["redis", "zookeeper"])
def book(request: pytest.FixtureRequest) -> Iterator[ScheduleStore]:
    if request.param == "redis":
        client = redis.Redis.from_url(request.getfixturevalue("redis_url"), socket_timeout=20)
        made: ScheduleStore = RedisScheduleStore(client, "dq:online:beat:shop")
        yield made
        made.close()
    else:
        session = Session(request.getfixturevalue("hosts"), timeout_s=15)
        yield ZooKeeperScheduleStore(session, BeatNodes("online", "shop"))
        session.close()


def test_a_new_entry_is_remembered_and_a_known_one_is_reported(book: ScheduleStore) -> None:
    entries = {f"{NAME}-{number}": minutes(number) for number in range(3)}
    assert book.adopt(1, known(**entries)) == {name: LastRun(ran, 0) for name, ran in entries.items()}
    later = {name: ran + timedelta(hours=1) for name, ran in entries.items()}
    assert book.adopt(2, known(**{**later, "new": START})) == {
        **{name: LastRun(ran, 0) for name, ran in entries.items()},
        "new": LastRun(START, 0),
    }
    assert book.adopt(2, {}) == {}


def test_a_tick_has_one_number_until_it_was_sent(book: ScheduleStore) -> None:
    book.adopt(1, known(**{NAME: START}))
    number = book.begin(1, NAME, START)
    assert isinstance(number, int)
    assert book.begin(2, NAME, START) == number
    book.done(2, NAME, number, LastRun(minutes(1), 1))
    following = book.begin(2, NAME, minutes(1))
    assert isinstance(following, int)
    assert following > number


def test_a_run_that_could_not_be_recorded_is_reported(book: ScheduleStore) -> None:
    number = book.begin(1, NAME, START)
    assert isinstance(number, int)
    book.done(1, NAME, number, LastRun(minutes(1), 7))
    assert book.begin(1, NAME, START) == LastRun(minutes(1), 7)
    assert book.adopt(1, known(**{NAME: START})) == {NAME: LastRun(minutes(1), 7)}


def test_a_change_that_was_reported_once_is_not_withdrawn(book: ScheduleStore) -> None:
    number = book.begin(1, NAME, START)
    assert isinstance(number, int)
    book.done(1, NAME, number, LastRun(minutes(1), 1))
    book.done(1, NAME, number, LastRun(minutes(9), 9))
    assert book.adopt(1, known(**{NAME: START})) == {NAME: LastRun(minutes(1), 1)}


def test_an_old_leader_is_kept_out(book: ScheduleStore) -> None:
    number = book.begin(1, NAME, START)
    assert isinstance(number, int)
    book.adopt(2, known(**{NAME: START}))
    for late in (lambda: book.begin(1, NAME, START), lambda: book.adopt(1, known(**{NAME: START}))):
        with pytest.raises(Fenced, match="token 2 above this beat's 1"):
            late()
    # The old leader cannot record its tick either: the new one relies on the broker's check.
    try:
        book.done(1, NAME, number, LastRun(minutes(1), 1))
    except Fenced as error:
        assert "token 2" in str(error)  # noqa: PT017 - either is right
    assert book.begin(2, NAME, START) == number


def test_times_in_any_zone_are_the_same(book: ScheduleStore) -> None:
    berlin = START.astimezone(ZoneInfo("Europe/Berlin"))
    assert micros(berlin) == micros(START)
    assert micros(berlin + timedelta(hours=1)) != micros(berlin)
    book.adopt(1, known(**{NAME: berlin}))
    assert book.adopt(1, known(**{NAME: START}))[NAME].at == START
    naive = datetime(2026, 1, 1, 12)
    book.adopt(1, known(naive=naive))
    assert book.adopt(1, known(naive=START))["naive"].at == naive


def test_a_server_that_is_away_is_an_oserror(redis_url: str) -> None:
    away = RedisScheduleStore(redis.Redis(port=1, retry=Retry(NoBackoff(), 0)), "dq:online:beat")
    with pytest.raises(OSError, match="did not answer the beat"):
        away.begin(1, NAME, START)


def test_a_time_that_is_later_than_accepted_is_brought_back(book: ScheduleStore) -> None:
    number = book.begin(1, NAME, START)
    assert isinstance(number, int)
    book.done(1, NAME, number, LastRun(minutes(60), 1))
    assert book.adopt(2, {NAME: Known(START, minutes(60))}) == {NAME: LastRun(minutes(60), 1)}
    assert book.adopt(2, {NAME: Known(START, minutes(5))}) == {NAME: LastRun(minutes(5), 1)}
    # A later run is not refused because of the corrected time.
    following = book.begin(2, NAME, minutes(5))
    assert isinstance(following, int)
    assert following > number


def test_a_later_run_than_recorded_means_that_the_pending_tick_was_sent(book: ScheduleStore) -> None:
    book.adopt(1, known(**{NAME: START}))
    sent = book.begin(1, NAME, START)
    following = book.begin(1, NAME, minutes(1))
    assert isinstance(sent, int)
    assert isinstance(following, int)
    assert following > sent
    assert book.begin(1, NAME, minutes(1)) == following
    assert book.begin(1, NAME, START) == LastRun(minutes(1), 0)


def test_the_time_of_an_entry_that_was_never_sent_is_no_run(book: ScheduleStore) -> None:
    book.adopt(1, known(**{NAME: minutes(10)}))
    assert isinstance(book.begin(1, NAME, START), int)


def test_many_entries_in_zookeeper_cost_few_requests(hosts: str, zookeeper: ZooKeeperServer) -> None:
    """One request after the other for each entry took longer than a term on a slow network."""
    session = Session(hosts, timeout_s=15)
    store = ZooKeeperScheduleStore(session, BeatNodes("online", "shop"))
    entries = {f"{NAME}-{number}": minutes(number) for number in range(1000)}
    session.open()
    for token in (1, 2):
        before = received(zookeeper)
        assert len(store.adopt(token, known(**entries))) == 1000
        store.retain(token, entries)
        assert received(zookeeper) - before < 100
    store.retain(2, {NAME})
    assert not session.ask(lambda client: client.get_children_async(BeatNodes("online", "shop").path), 15)
    session.close()


def received(server: ZooKeeperServer) -> int:
    """Return the number of requests that the server has received."""
    return int(re.search(r"zk_packets_received\t(\d+)", server.ask("mntr"))[1])  # type: ignore[index]
