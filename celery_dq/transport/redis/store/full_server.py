"""Small writes and counts on a Redis whose memory is full.

A worker declares its queues and its mailbox before it consumes. A full Redis (``maxmemory``, ``noeviction``)
refuses these writes as it refuses messages, but only the worker can empty it. Redis lets a script go on that
has already written something. So a refused write is repeated in a script whose first write changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis

_ADD = "redis.call('SREM', KEYS[1], '') return redis.call('SADD', KEYS[1], ARGV[1])"
#: Pops an element of the first list that has one; returns its key and the element.
POP_FIRST = """for _, key in ipairs(KEYS) do
local value = redis.call('LPOP', key) if value then return {key, value} end end"""
_SET = "redis.call('DEL', KEYS[1]) return redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])"


def is_full(error: redis.ResponseError) -> bool:
    """Return whether Redis has refused a write because its memory is full."""
    # Before Redis 7 an error inside a script is wrapped in another.
    return isinstance(error, redis.exceptions.OutOfMemoryError) or "-OOM " in str(error)


def read_together(client: Any, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return the answers to these reading *commands*, all of the same moment.

    A full Redis refuses every command in a transaction, so there the answers are of different moments.
    """
    try:
        return _read(client, commands, transaction=True)
    except redis.ResponseError as exc:
        if not is_full(exc):
            raise
        return _read(client, commands, transaction=False)


def _read(client: Any, commands: Sequence[tuple[Any, ...]], *, transaction: bool) -> list[Any]:
    with client.pipeline(transaction=transaction) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        answers: list[Any] = pipe.execute()
        return answers


def add_member(client: Any, key: str, member: str) -> None:
    """Add *member* to the set *key*."""
    try:
        client.sadd(key, member)
    except redis.ResponseError as exc:
        if not is_full(exc):
            raise
        client.eval(_ADD, 1, key, member)


def set_for(client: Any, key: str, value: int, life_ms: int) -> None:
    """Set *key* to *value*; it expires after *life_ms*."""
    try:
        client.set(key, value, px=life_ms)
    except redis.ResponseError as exc:
        if not is_full(exc):
            raise
        client.eval(_SET, 1, key, value, life_ms)
