"""What beats share, in Redis and in ZooKeeper: the same rules."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_dq.beat.book import Book, Ran, RedisBook, ZooKeeperBook, micros
from celery_dq.errors import Fenced
from celery_dq.znodes import beat_entry
from celery_dq.zookeeper.session import Session

START = datetime(2026, 3, 29, 0, 30, tzinfo=timezone.utc)
#: Not every entry is called something nice.
NAME = "daily: report/|%s.*"


def minutes(count: float) -> datetime:
    return START + timedelta(minutes=count)


@pytest.fixture(params=["redis", "zookeeper"])
def book(request: pytest.FixtureRequest) -> Iterator[Book]:
    if request.param == "redis":
        client = redis.Redis.from_url(request.getfixturevalue("redis_url"), socket_timeout=20)
        made: Book = RedisBook(client, "dq:online:beat:shop")
        yield made
        made.close()
    else:
        session = Session(request.getfixturevalue("hosts"), timeout_s=15)
        yield ZooKeeperBook(session, lambda entry: beat_entry("online", "shop", entry))
        session.close()


def test_what_is_new_is_remembered_and_what_is_known_is_told(book: Book) -> None:
    entries = {f"{NAME}-{number}": minutes(number) for number in range(3)}
    assert book.adopt(1, entries) == {name: Ran(ran, 0) for name, ran in entries.items()}
    later = {name: ran + timedelta(hours=1) for name, ran in entries.items()}
    assert book.adopt(2, {**later, "new": START}) == {
        **{name: Ran(ran, 0) for name, ran in entries.items()},
        "new": Ran(START, 0),
    }
    assert book.adopt(2, {}) == {}


def test_a_tick_has_one_number_until_it_was_sent(book: Book) -> None:
    book.adopt(1, {NAME: START})
    number = book.begin(1, NAME, START)
    assert isinstance(number, int)
    assert book.begin(2, NAME, START) == number
    book.done(2, NAME, number, Ran(minutes(1), 1))
    following = book.begin(2, NAME, minutes(1))
    assert isinstance(following, int)
    assert following > number


def test_who_does_not_know_that_it_has_run_is_told(book: Book) -> None:
    number = book.begin(1, NAME, START)
    assert isinstance(number, int)
    book.done(1, NAME, number, Ran(minutes(1), 7))
    assert book.begin(1, NAME, START) == Ran(minutes(1), 7)
    assert book.adopt(1, {NAME: START}) == {NAME: Ran(minutes(1), 7)}


def test_what_was_said_once_is_not_unsaid(book: Book) -> None:
    number = book.begin(1, NAME, START)
    assert isinstance(number, int)
    book.done(1, NAME, number, Ran(minutes(1), 1))
    book.done(1, NAME, number, Ran(minutes(9), 9))
    assert book.adopt(1, {NAME: START}) == {NAME: Ran(minutes(1), 1)}


def test_an_old_leader_is_kept_out(book: Book) -> None:
    number = book.begin(1, NAME, START)
    assert isinstance(number, int)
    book.adopt(2, {NAME: START})
    for late in (lambda: book.begin(1, NAME, START), lambda: book.adopt(1, {NAME: START})):
        with pytest.raises(Fenced, match="token 2; ours is 1"):
            late()
    # Neither does it say anything about what it has sent: the new one finds out at the broker.
    try:
        book.done(1, NAME, number, Ran(minutes(1), 1))
    except Fenced as error:
        assert "token 2" in str(error)  # noqa: PT017 - either is right
    assert book.begin(2, NAME, START) == number


def test_times_in_any_zone_are_the_same(book: Book) -> None:
    berlin = START.astimezone(ZoneInfo("Europe/Berlin"))
    assert micros(berlin) == micros(START)
    assert micros(berlin + timedelta(hours=1)) != micros(berlin)
    book.adopt(1, {NAME: berlin})
    assert book.adopt(1, {NAME: START})[NAME].at == START
    naive = datetime(2026, 1, 1, 12)
    book.adopt(1, {"naive": naive})
    assert book.adopt(1, {"naive": START})["naive"].at == naive


def test_a_server_that_is_away_is_an_oserror(redis_url: str) -> None:
    away = RedisBook(redis.Redis(port=1, retry=Retry(NoBackoff(), 0)), "dq:online:beat")
    with pytest.raises(OSError, match="did not answer the beat"):
        away.begin(1, NAME, START)
