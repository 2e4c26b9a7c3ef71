"""The scripts of the tenant broker, a call of one of them, and calls on many queues in few round trips."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from typing import Any, Generic, TypeVar

import redis
from redis.exceptions import NoScriptError

from celery_dq.scripts.loader import Argument, Redis, Script, ScriptSet
from celery_dq.transport.redis.store.pipelined_connection import PipelinedConnection

T = TypeVar("T")

#: The names of the scripts, each a file of the folder.
SCRIPTS = (
    "ack",
    "backlogs",
    "cancel",
    "cancel_tenant",
    "claim",
    "dead_letter",
    "departed",
    "drop_exported",
    "edit",
    "declare_partitions",
    "evict",
    "explain_tenant",
    "export_messages",
    "fence",
    "forget_dead",
    "locate",
    "hand_over_wakeup",
    "oldest_waiting",
    "pause",
    "place_held_back",
    "purge",
    "push",
    "quota",
    "recover",
    "release",
    "heartbeat",
    "import_messages",
    "open_tenants",
    "replay",
    "resign",
    "set_partitions",
    "settings_quota",
    "take",
)


@dataclasses.dataclass(eq=False, slots=True)
class ScriptCall(Generic[T]):
    """A script with its arguments, ready to be sent."""

    script: Script
    keys: tuple[str, ...]
    args: tuple[Argument, ...]
    parse: Callable[[Any], T]

    def command(self, full: bool = False) -> tuple[Argument, ...]:
        """Return the words to send; ``full`` after the server answered NOSCRIPT."""
        if full:
            return self.script.command(self.keys, self.args, full=True)
        return ("EVALSHA", self.script.sha1, len(self.keys), *self.keys, *self.args)

    def run(self, client: Redis) -> T:
        """Send the call on ``client``, wait, and return the parsed reply."""
        return self.parse(self.script.run(client, self.keys, self.args))


def commands_with_sources(calls: Sequence[ScriptCall[Any]]) -> list[tuple[Argument, ...]]:
    """Return the words that send these calls, in this order, to a server that lacks their scripts.

    Only the first call of each script carries the source: it brings the script to the server.
    """
    brought: set[str] = set()
    commands = []
    for call in calls:
        commands.append(call.command(full=call.script.sha1 not in brought))
        brought.add(call.script.sha1)
    return commands


@functools.cache  # to put them together takes six times as long as the rest of a new connection
def load_scripts(on_cluster: bool = False) -> ScriptSet:
    """Return the scripts of the tenant broker, read from their files at the first call.

    Args:
        on_cluster: Whether they run on a Redis Cluster.
    """
    return ScriptSet(files("celery_dq.transport.redis") / "lua", *SCRIPTS, on_cluster=on_cluster)


#: Calls that one round trip carries, each for another queue.
CALLS_PER_TRIP = 100
#: Fewest messages that each of these calls may move.
MIN_SHARE = 10


def chunks(queues: Sequence[T]) -> Iterator[Sequence[T]]:
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
    while NoScriptError in map(type, answers):
        unknown = [place for place, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        again = _exchange(commands_with_sources([calls[place] for place in unknown]), wire)
        for place, answer in zip(unknown, again, strict=True):
            answers[place] = answer
    return answers


def ask_script(wire: PipelinedConnection, call: ScriptCall[Any]) -> Any:
    """Send a script, also to a server that lacks it, and wait for its raw answer.

    Raises:
        redis.RedisError: The answer is an error, or the connection broke.
    """
    try:
        return wire.ask(call.command())
    except NoScriptError:
        return wire.ask(call.command(full=True))


def run_all(calls: Sequence[ScriptCall[T]], client: redis.Redis) -> list[T]:
    """Return the parsed answers to these calls, in few round trips.

    Raises:
        redis.RedisError: No connection, or the first error among the answers. Other calls may have run.
    """
    results: list[T] = []
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
            try:
                answers.append(wire.read())
            except redis.ResponseError as exc:  # noqa: PERF203 - the next answer follows
                answers.append(exc)
    except (redis.RedisError, OSError) as exc:
        answers += [exc] * (len(commands) - len(answers))
    return answers


def result_of(call: ScriptCall[T], answer: Any) -> T:
    """Return the parsed answer; raise it if it is an error."""
    if isinstance(answer, Exception):
        raise answer
    return call.parse(answer)
