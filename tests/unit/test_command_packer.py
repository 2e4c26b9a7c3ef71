"""The packer of commands writes the same bytes as redis-py."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from hypothesis import example, given, settings, strategies as st

from celery_dq.transport.redis.store.pipelined_connection import CommandPacker

#: The classes of redis-py have no types.
theirs: Any = redis.connection
words = st.binary() | st.text(st.characters(exclude_categories=["Cs"])) | st.integers() | st.floats()


class Text(str):
    """A text of another class."""


@given(st.lists(words, max_size=20))
@example([Text("é"), bytearray(b"a b"), memoryview(b"x"), "x" * 7000, b"y" * 7000, 2**70])
@settings(deadline=None)
@pytest.mark.parametrize("name", ["EVALSHA", "CONFIG GET", b"GET", b"SCRIPT LOAD"])
def test_a_command_is_written_as_by_redis_py(name: Any, arguments: list[Any]) -> None:
    packer = theirs.PythonRespSerializer(6000, theirs.Encoder("utf-8", "strict", False).encode)
    assert b"".join(CommandPacker().pack(name, *arguments)) == b"".join(packer.pack(name, *arguments))


@pytest.mark.parametrize("word", [None, True, [1], {}])
def test_other_words_are_refused_as_by_redis_py(word: Any) -> None:
    with pytest.raises(redis.DataError):
        CommandPacker().pack("SET", "key", word)
