"""Procedures of several round trips, run side by side on many partitions in as few round trips as one.

A *procedure* is a generator for one partition or queue. It yields a round, which is a script call, a list of
them, or a function that puts commands into a pipeline of redis-py, and gets the answers. :func:`run_rounds`
sends the rounds of many procedures in one pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, TypeVar

import redis
from redis.exceptions import NoScriptError

from celery_dq.transport.redis.store.full_server import is_full
from celery_dq.transport.redis.store.script_calls import ScriptCall, commands_with_sources

T = TypeVar("T")
K = TypeVar("K")
P = TypeVar("P", bound=Hashable)
#: Puts the commands of one round into a pipeline.
Commands: TypeAlias = Callable[[Any], object]


class Atomic(NamedTuple):
    """A round whose commands only read, all at the same moment.

    A full Redis refuses every command in a transaction. Then the answers are of different moments.
    """

    commands: Commands


class Beside(NamedTuple):
    """A round with a script call, and commands that are sent in the same pipeline.

    The answer is a list of the parsed reply and the answers to the commands.
    """

    call: ScriptCall[Any]
    commands: Commands | None


def together(*commands: Commands) -> Commands:
    """Return the commands of all of these, in their order."""
    return lambda pipe: [each(pipe) for each in commands]


Round: TypeAlias = "Commands | Atomic | Beside | ScriptCall[Any] | Sequence[ScriptCall[Any]]"
#: A procedure. The answer to a round is a list; of a script call it is the parsed reply.
Rounds: TypeAlias = Generator[Round, Any, T]

#: Procedures whose rounds share a pipeline. Redis serves no other client while it executes one pipeline.
AT_ONCE = 64


def run_rounds(client: Any, procedures: Iterable[Rounds[T]], *, at_once: int = AT_ONCE) -> list[T]:
    """Run procedures to their ends, and return their results in order.

    Args:
        client: A redis-py client.
        procedures: The procedures, each for another partition.
        at_once: Number of procedures whose rounds share a pipeline: fewer for rounds that take long.

    Raises:
        redis.RedisError: Redis refused a command, or did not answer. The other commands of the same pipeline
            may have been executed.
    """
    results: list[T] = []
    left: Iterator[Rounds[T]] = iter(procedures)
    while batch := list(islice(left, at_once)):
        results += _run_batch(client, batch)
    return results


def run_one(client: Any, procedure: Rounds[T]) -> T:
    """Run one procedure to its end, and return its result."""
    (result,) = _run_batch(client, [procedure])
    return result


def run_chosen(
    client: Any,
    chosen: Sequence[tuple[P, K]],
    procedure: Callable[[P, list[K]], Rounds[Sequence[T]]],
) -> list[T]:
    """Run a procedure once for each partition, with the items chosen there.

    Args:
        client: A redis-py client.
        chosen: The partitions and items.
        procedure: Returns one result per item, in their order.

    Returns:
        The results in the order of `chosen`.
    """
    places: dict[P, list[int]] = {}
    for place, (partition, _) in enumerate(chosen):
        places.setdefault(partition, []).append(place)
    found = run_rounds(
        client,
        [procedure(partition, [chosen[each][1] for each in own]) for partition, own in places.items()],
    )
    results: dict[int, T] = {}
    for own, values in zip(places.values(), found, strict=True):
        results.update(zip(own, values, strict=True))
    return [results[place] for place in range(len(chosen))]


def _run_batch(client: Any, procedures: Sequence[Rounds[T]]) -> list[T]:
    results: dict[int, T] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(procedures)))
    while answers:
        rounds: dict[int, Round] = {}
        for place, answer in answers.items():
            try:
                rounds[place] = procedures[place].send(answer)
            except StopIteration as end:  # noqa: PERF203 - each procedure ends by itself
                results[place] = end.value
        answers = dict(zip(rounds, _exchange(client, list(rounds.values())), strict=True)) if rounds else {}
    return [results[place] for place in range(len(procedures))]


def _exchange(client: Any, rounds: Sequence[Round]) -> list[Any]:
    if not any(isinstance(each, Atomic) for each in rounds):
        return _send(client, rounds, transaction=False)
    try:
        return _send(client, rounds, transaction=True)
    except redis.ResponseError as exc:
        if not is_full(exc):
            raise
        return _send(client, rounds, transaction=False)


def _send(client: Any, rounds: Sequence[Round], *, transaction: bool) -> list[Any]:
    with client.pipeline(transaction=transaction) as pipe:
        calls: dict[int, ScriptCall[Any]] = {}
        ends = [_put(pipe, each, calls) for each in rounds]
        answers = pipe.execute(raise_on_error=False)
    # Each node of a cluster may lack a script, and each pass brings it to one more.
    while unknown := [place for place, answer in enumerate(answers) if isinstance(answer, NoScriptError)]:
        with client.pipeline(transaction=False) as pipe:
            for command in commands_with_sources([calls[place] for place in unknown]):
                pipe.execute_command(*command)
            for place, answer in zip(unknown, pipe.execute(raise_on_error=False), strict=True):
                answers[place] = answer
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    for place, call in calls.items():
        answers[place] = call.parse(answers[place])
    starts = [0, *ends]
    return [
        answers[start] if isinstance(each, ScriptCall) else answers[start:end]
        for each, start, end in zip(rounds, starts, ends, strict=False)
    ]


def _put(pipe: Any, each: Round, calls: dict[int, ScriptCall[Any]]) -> int:
    """Put the commands of a round into a pipeline.

    Args:
        pipe: The pipeline.
        each: The round.
        calls: Receives the script calls, each of which is one command, by their places in the pipeline.

    Returns:
        The number of commands in the pipeline by then.
    """
    if isinstance(each, Atomic):
        each.commands(pipe)
    elif isinstance(each, Beside):
        calls[len(pipe)] = each.call
        pipe.execute_command(*each.call.command())
        if each.commands is not None:
            each.commands(pipe)
    elif callable(each):
        each(pipe)
    else:
        for call in (each,) if isinstance(each, ScriptCall) else each:
            calls[len(pipe)] = call
            pipe.execute_command(*call.command())
    return len(pipe)
