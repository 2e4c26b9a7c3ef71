"""Scripts for many queues in few round trips, for a client that waits for the answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import redis
from redis.exceptions import NoScriptError

from celery_dq.scripts.loader import Redis
from celery_dq.transport.redis.store.partition import ScriptCall
from celery_dq.transport.redis.store.queue import Queue

_T = TypeVar("_T")

#: Calls that one round trip carries, each for another queue.
CALLS_PER_TRIP = 100


def chunks(queues: Sequence[Queue]) -> Iterator[Sequence[Queue]]:
    """Yield these queues, as many at a time as one round trip serves."""
    for start in range(0, len(queues), CALLS_PER_TRIP):
        yield queues[start : start + CALLS_PER_TRIP]


def run_together(calls: Sequence[ScriptCall[Any]], client: redis.Redis) -> list[Any]:
    """Return the answers to these calls, of which each may be an exception."""
    with client.pipeline(transaction=False) as pipe:
        commands: Redis = pipe
        for call in calls:
            commands.execute_command(*call.command())
        answers: list[Any] = pipe.execute(raise_on_error=False)
        return answers


def result_of(call: ScriptCall[_T], answer: Any, client: redis.Redis) -> _T:
    """Return the parsed answer; raise it if it is an error."""
    if isinstance(answer, NoScriptError):
        return call.run(client)
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
