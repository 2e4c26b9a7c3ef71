"""The commands of a pipelined connection: the bytes that redis-py would send, in one write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import redis

from celery_dq.transport.redis.store.script_calls import PipelinedConnection

#: A word of each type and length, as the scripts get them.
WORDS = ("", "push", "zażółć", b"", b"\x00\xff\r\n$3\r\n", b"x" * 70_000, 0, 7, 10**15, 1.5)


@pytest.fixture
def connection(redis_url: str) -> Iterator[PipelinedConnection]:
    pool = redis.ConnectionPool.from_url(redis_url)
    connection = PipelinedConnection(pool)
    connection.open()
    yield connection
    connection.close()
    pool.disconnect()


def test_redis_gets_each_word_as_it_is(connection: PipelinedConnection) -> None:
    encode = connection.connection.encoder.encode
    for word in WORDS:
        assert connection.ask(("ECHO", word)) == encode(word), word


def test_commands_that_are_sent_together_are_one_write(
    connection: PipelinedConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A thread gives up Python's lock at each write, and waits long for it while other threads make calls.
    writes: list[bytes] = []
    send = connection.connection.send_packed_command

    def recorded(pieces: Iterable[bytes], **options: Any) -> None:
        writes.extend(pieces)
        send(pieces, **options)

    monkeypatch.setattr(connection.connection, "send_packed_command", recorded)
    connection.send_all([("ECHO", b"%d" % number * 100) for number in range(500)])
    assert [connection.read() for _ in range(500)] == [b"%d" % number * 100 for number in range(500)]
    assert connection.ask(("ECHO", *WORDS[5:6])) == WORDS[5]
    assert len(writes) == 2
