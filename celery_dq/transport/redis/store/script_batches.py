"""Scripts for many queues in few round trips, for a client that waits for the answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import redis
from redis.exceptions import NoScriptError

from celery_dq.transport.redis.store.pipelined_connection import PipelinedConnection
from celery_dq.transport.redis.store.queue import Queue
from celery_dq.transport.redis.store.script_calls import ScriptCall, commands_with_sources

_T = TypeVar("_T")

#: Calls that one round trip carries, each for another queue.
CALLS_PER_TRIP = 100
#: Fewest messages that each of these calls may move.
MIN_SHARE = 10


def chunks(queues: Sequence[Queue]) -> Iterator[Sequence[Queue]]:
    """Yield these queues, as many at a time as one round trip serves."""
    for start in range(0, len(queues), CALLS_PER_TRIP):
        yield queues[start : start + CALLS_PER_TRIP]


def share(messages: int, calls: int) -> int:
    """Return how many messages each of these calls moves. Redis serves no other client during a trip."""
    return max(messages // calls, MIN_SHARE)


def run_together(calls: Sequence[ScriptCall[Any]], client: redis.Redis) -> list[Any]:
    """Return the answers to these calls, of which each may be an exception; see :func:`run_on`.

    Raises:
        redis.RedisError: no connection; no call was sent.
    """
    wire, answers = PipelinedConnection(client.connection_pool), list[Any]()
    try:
        answers = run_on(calls, wire)
    finally:
        wire.close(reusable=not any(map(is_lost, answers)) and bool(answers))
    return answers


def run_on(
    calls: Sequence[ScriptCall[Any]], wire: PipelinedConnection, check_health: bool = False
) -> list[Any]:
    """Return the answers to these calls, which one write sends; each answer may be an exception.

    When the connection breaks, the answers that have arrived are kept, because a lost lease is reported only
    once. A pipeline of redis-py discards them, and may send all calls again.

    Args:
        calls: The calls.
        wire: The connection.
        check_health: See :meth:`PipelinedConnection.send_all`.

    Raises:
        redis.RedisError: no connection; no call was sent.
    """
    wire.open()
    answers = _exchange([call.command() for call in calls], wire, check_health)
    # Each node of a cluster may lack a script, and each pass brings it to one more.
    while unknown := [place for place, answer in enumerate(answers) if isinstance(answer, NoScriptError)]:
        again = _exchange(commands_with_sources([calls[place] for place in unknown]), wire)
        for place, answer in zip(unknown, again, strict=True):
            answers[place] = answer
    return answers


def run_all(calls: Sequence[ScriptCall[_T]], client: redis.Redis) -> list[_T]:
    """Return the parsed answers to these calls, in few round trips.

    Raises:
        redis.RedisError: No connection, or the first error among the answers. Other calls may have run.
    """
    results: list[_T] = []
    for start in range(0, len(calls), CALLS_PER_TRIP):
        chunk = calls[start : start + CALLS_PER_TRIP]
        results += map(result_of, chunk, run_together(chunk, client))
    return results


def is_lost(answer: Any) -> bool:
    """Return whether an answer is the error of a broken connection, on which no further answer comes."""
    return isinstance(answer, (redis.RedisError, OSError)) and not isinstance(answer, redis.ResponseError)


def _exchange(
    commands: Sequence[tuple[Any, ...]], wire: PipelinedConnection, check_health: bool = False
) -> list[Any]:
    answers: list[Any] = []
    try:
        wire.send_all(commands, check_health)
        while len(answers) < len(commands):
            answers.append(_read(wire))
    except (redis.RedisError, OSError) as exc:
        answers += [exc] * (len(commands) - len(answers))
    return answers


def _read(wire: PipelinedConnection) -> Any:
    try:
        return wire.read()
    except redis.ResponseError as exc:
        return exc


def result_of(call: ScriptCall[_T], answer: Any) -> _T:
    """Return the parsed answer; raise it if it is an error."""
    if isinstance(answer, Exception):
        raise answer
    return call.parse(answer)


def is_wakeup_stored(queues: Sequence[Queue], client: redis.Redis) -> bool:
    """Return whether a wake-up of one of these queues is stored that no consumer has taken."""
    for chunk in chunks(queues):
        with client.pipeline(transaction=False) as pipe:
            for queue in chunk:
                pipe.llen(queue.partition.keys.wake)
            if any(pipe.execute()):
                return True
    return False


def held_counts(queues: Sequence[Queue], consumer: str, client: redis.Redis) -> list[Any]:
    """Return how many messages of each of these queues the broker has for a consumer, in one round trip.

    Each answer may be an exception.
    """
    with client.pipeline(transaction=False) as pipe:
        for queue in queues:
            pipe.hlen(queue.partition.keys.held(queue.consumer(consumer)))
        return list(pipe.execute(raise_on_error=False))
