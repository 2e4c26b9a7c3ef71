"""The scripts of the tenant broker, a call of one of them, and calls on many queues in few round trips.

A :class:`PipelinedConnection` sends commands without waiting for their answers. A thread may wait at the
socket of its ``watched`` for an answer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.resources import files
from typing import Any, Generic, TypeVar

import redis
from kombu.utils.eventio import ERR, READ, poll
from redis.connection import AbstractConnection
from redis.exceptions import NoScriptError

from celery_dq.compat.redis_sockets import socket_of
from celery_dq.scripts.loader import Argument, Redis, Script, ScriptSet
from celery_dq.transport.redis.store.server_checks import recognised_error

T = TypeVar("T")

#: Seconds after which an unanswered BLPOP is sent again: long enough to cost nothing, short enough to notice
#: a dead connection.
BLPOP_TIMEOUT_S = 10
#: Seconds without an answer, after those of a BLPOP, after which a connection counts as dead.
OVERDUE_S = 5
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
    "requeue_and_pause",
    "heartbeat",
    "import_messages",
    "open_tenants",
    "replay",
    "resign",
    "set_partitions",
    "settings_quota",
    "take",
    "tenant_settings",
)
#: Calls that one round trip carries, each for another queue.
CALLS_PER_TRIP = 100
#: Fewest messages that each of these calls may move.
MIN_SHARE = 10


def has_arrived(connection: Any) -> bool:
    """Return whether the socket of a redis-py connection has data to read; False when it is closed."""
    sock = None if connection is None else socket_of(connection)
    if sock is None or sock.fileno() < 0:
        return False
    pending = getattr(sock, "pending", None)  # data that TLS has decrypted
    if pending is not None and pending():
        return True
    poller = poll()
    try:
        poller.register(sock.fileno(), READ | ERR)
        return bool(poller.poll(0))
    finally:
        poller.close()


def pack(commands: Iterable[Sequence[Argument]]) -> bytes:
    """Return commands as the bytes of one write.

    redis-py packs a word three times slower, and writes pieces of 6 kB one by one. With each write the
    writing thread gives up Python's lock; while another thread makes calls, it waits long to get it back.
    """
    parts = []
    for command in commands:
        parts.append(b"*%d\r\n" % len(command))
        for word in command:
            if type(word) is not bytes:
                word = (word if isinstance(word, str) else repr(word)).encode()
            parts.append(b"$%d\r\n%b\r\n" % (len(word), word))
    return b"".join(parts)


class PipelinedConnection:
    """A connection that is taken out of a pool and kept until :meth:`close`.

    Args:
        pool: the pool, with addresses, TLS, credentials and Sentinels.
        may_repeat: whether the commands may run twice. A connection to a Redis Cluster then sends those again
            whose answers were lost.
    """

    def __init__(self, pool: redis.ConnectionPool, may_repeat: bool = False) -> None:
        self._pool = pool
        self._may_repeat = may_repeat
        #: The redis-py connection; None before :meth:`open` and after :meth:`close`.
        self.connection: Any = None
        #: Whether commands are packed here. A connection to a cluster takes them as they are, for many nodes.
        self._packs = True
        #: How often another connection or socket was opened, to a node of a cluster, too.
        self.connects = 0

    @property
    def watched(self) -> Any:
        """The redis-py connection at whose socket an answer arrives; None without one."""
        return getattr(self.connection, "awaited", self.connection)

    def open(self) -> None:
        """Connect, unless connected.

        Raises:
            redis.ConnectionError: the server cannot be reached.
        """
        if self.connection is None:
            # The argument became optional in redis-py 5.3, and a warning in 6.
            if redis.VERSION >= (5, 3):
                self.connection = self._pool.get_connection()
            else:
                self.connection = self._pool.get_connection("_")
            self.connects += 1
            self._packs = isinstance(self.connection, AbstractConnection)
        if socket_of(self.connection) is None:
            self.connection.connect()
            self.connects += 1
        if self._may_repeat:
            self.connection.may_repeat = True

    def send(self, command: tuple[Any, ...]) -> None:
        """Send *command*; its answer is the next one that :meth:`read` returns."""
        self.send_all((command,))

    def send_all(self, commands: Sequence[tuple[Argument, ...]], check_health: bool = False) -> None:
        """Send commands at once, in one write if they are short.

        Args:
            commands: the commands.
            check_health: redis-py may check the connection's health before, which waits for a PONG.
        """
        if self._packs:
            self.connection.send_packed_command((pack(commands),), check_health=check_health)
        else:
            before = self.connection.connects
            self.connection.send_packed_command(commands, check_health=check_health)
            self.connects += self.connection.connects - before

    def read(self) -> Any:
        """Return the next answer; wait for it up to the socket timeout.

        Raises:
            redis.RedisError: the answer is an error, or the connection broke.
        """
        try:
            return self.connection.read_response()
        except redis.ResponseError as exc:
            raise recognised_error(exc) from None

    def ask(self, command: tuple[Any, ...]) -> Any:
        """Send *command* and wait for its answer, up to the socket timeout.

        redis-py may check the connection's health before, and connects again when it was closed.

        Raises:
            redis.RedisError: the answer is an error, or the connection broke.
        """
        self.send_all((command,), check_health=True)
        return self.read()

    def has_answer(self) -> bool:
        """Return whether an answer, or a part of one, has arrived."""
        return bool(self.connection is not None and self.connection.can_read(timeout=0))

    def has_unread_input(self) -> bool:
        """Return whether the socket has data, without reading any, so that a poller still sees it.

        :meth:`has_answer` may move data into the buffer (redis-py before 6), where no poller sees it.
        """
        return has_arrived(self.connection)

    def close(self, reusable: bool = False) -> None:
        """Close the connection; commands without an answer may or may not have been executed.

        Args:
            reusable: all answers were read, so that the pool may keep the connection open.
        """
        connection, self.connection = self.connection, None
        if connection is not None:
            if not reusable:
                connection.disconnect()
            self._pool.release(connection)


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
