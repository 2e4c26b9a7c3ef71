"""The meaning of the errors with which Redis answers commands, and their remedies.

Callers of Celery and kombu catch :exc:`kombu.exceptions.OperationalError`. The errors of redis-py are no
subclasses of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import redis
from kombu.exceptions import OperationalError

from celery_dq.errors import DQError, InvalidMessage, QueueFull
from celery_dq.lost_attempts import means_too_large
from celery_dq.outage import Outage
from celery_dq.shown import shown_logger
from celery_dq.transport.redis.store.server_checks import PASSING_ERRORS

__all__ = [
    "BacklogFull",
    "BrokerNotReady",
    "BrokerOverloaded",
    "BrokerRefused",
    "MessageRefused",
    "PartitionsChanging",
    "PushInterrupted",
    "RefusalLog",
    "message_refused",
    "refusals_as_outage",
    "refusals_named",
]

logger = shown_logger(__name__)


class BrokerRefused(DQError, OperationalError, redis.ResponseError):
    """Redis answered a publish or another request with an error. Nothing was stored."""

    # `repr` of redis-py's class has no text.
    __repr__ = Exception.__repr__


class BrokerOverloaded(BrokerRefused):
    """Redis takes no writes now: it is full, cannot save, has too few replicas, or is busy."""


class BrokerNotReady(BrokerOverloaded, redis.ConnectionError):
    """Redis takes no writes now, so that no connection can be used: connect again later."""


class PartitionsChanging(BrokerOverloaded):
    """The number of partitions of a queue has changed; no message was stored, and sending again is safe."""


class MessageRefused(BrokerRefused):
    """Redis, or a proxy before it, will never take this message. Other messages are not affected."""


class BacklogFull(QueueFull, OperationalError):
    """As many messages of a tenant wait as its ``max_waiting`` allows, so calls were not stored.

    Attributes:
        task_ids: Ids of the calls that were not stored. All others of the same batch are stored.
        waits: Whether the quota lets the caller wait until there is room.
    """

    task_ids: tuple[str, ...] = ()
    waits = False

    @classmethod
    def of(
        cls, task_ids: Iterable[str], tenant: str, queue: str, bound: int, *, is_share: bool, waits: bool
    ) -> BacklogFull:
        """Return the error of calls.

        Args:
            task_ids: Ids of the calls.
            tenant: The tenant of the first one.
            queue: The name of the queue.
            bound: How many messages may wait.
            is_share: Whether that is the share of one partition.
            waits: Whether the quota lets the caller wait.
        """
        place, whose = ("a partition of ", "its share of the") if is_share else ("", "its")
        longer = ", or give calls more time (they wait for two thirds of dq_publish_timeout)" if waits else ""
        ids = tuple(task_ids)
        messages, wait = ("message", "waits") if bound == 1 else ("messages", "wait")
        what = "the call was" if len(ids) == 1 else f"{len(ids)} calls were"
        error = cls(
            f"{what} not sent: {bound:,} {messages} of tenant {tenant!r} {wait} in {place}queue {queue!r}, "
            f"and {whose} max_waiting allows no more. Call again when workers have caught up, or raise "
            f"max_waiting (celery dq quotas set){longer}"
        )
        error.task_ids, error.waits = ids, waits
        return error


#: The smallest number of bytes to which Redis can limit a request.
_SMALLEST_LIMIT = 1 << 20
_TOO_LARGE = (
    "when a message exceeds a limit of Redis (proto-max-bulk-len, client-query-buffer-limit) or of a proxy, "
    "pass the place of its data instead of the data, or raise the limit"
)


class PushInterrupted(redis.ConnectionError):
    """The connection was closed while messages were sent on it, or before the answer came.

    Attributes:
        is_large: Whether the size of the messages may be the reason.
    """

    is_large = False

    @classmethod
    def of(cls, error: BaseException, queue: str, sizes: Sequence[int]) -> PushInterrupted:
        """Return the error of messages with these sizes, in bytes."""
        count, size = len(sizes), sum(sizes)
        what = "a message" if count == 1 else f"{count} messages"
        is_large = size >= _SMALLEST_LIMIT
        remedy = f"; {_TOO_LARGE}" * is_large
        made = cls(
            f"The connection was closed at {what} of {size:,} bytes to queue {queue!r} ({error}){remedy}"
        )
        made.is_large = is_large
        return made


def message_refused(error: PushInterrupted, attempts: int) -> MessageRefused:
    """Return the error of messages that lost their connection at each of some attempts.

    Args:
        error: The last loss.
        attempts: Number of attempts in a row. In between, Redis answered other commands on new connections.
    """
    return MessageRefused(f"{error}. Each of {attempts} attempts ended so, and other commands were answered")


class _IsReplica(redis.ReadOnlyError):
    """Redis is a replica: kombu retries, and at last raises its own error with this text."""


class _Meaning(NamedTuple):
    """The class and text for errors whose class name and text match the pattern."""

    pattern: re.Pattern[str]
    error: type[BrokerRefused]
    text: str


_MEANINGS = (
    _Meaning(
        re.compile(r"Protocol error: (invalid (multi)?bulk length|too big)"),
        MessageRefused,
        f"Redis cannot read the request: {_TOO_LARGE}",
    ),
    _Meaning(
        re.compile(r"OutOfMemoryError|\bOOM\b|command not allowed when used memory"),
        BrokerOverloaded,
        "Redis is full: let workers empty its queues, or raise maxmemory",
    ),
    _Meaning(
        re.compile(r"\bMISCONF\b"),
        BrokerOverloaded,
        "Redis cannot save its data and refuses writes: see its log for the reason; free its disk, or repair "
        "the folder",
    ),
    _Meaning(
        re.compile(r"\bNOREPLICAS\b"),
        BrokerOverloaded,
        "Redis has fewer replicas than min-replicas-to-write: start replicas, or lower that setting",
    ),
    _Meaning(
        re.compile(r"\bBUSY\b"),
        BrokerOverloaded,
        "Redis runs a script of another client that does not end: end it with SCRIPT KILL",
    ),
    _Meaning(
        re.compile(r"NoPermissionError|\bNOPERM\b"),
        BrokerRefused,
        "the Redis user of broker_url lacks a right: grant it with ACL SETUSER",
    ),
    _Meaning(
        re.compile(r"MovedError|AskError|CrossSlot|\bMOVED\b|\bCROSSSLOT\b"),
        BrokerRefused,
        "broker_url names a node of a Redis Cluster as a single server: write dq-rediscluster://host:port",
    ),
    _Meaning(
        re.compile(r"\bWRONGTYPE\b"),
        BrokerRefused,
        "a key of the queue holds a value of another program: give celery-dq a database of its own, or set "
        "dq_key_prefix",
    ),
)


@contextmanager
def refusals_named() -> Iterator[None]:
    """Replace errors of Redis by errors with a meaning and a remedy.

    Raises:
        BrokerRefused: Redis refused the command.
        InvalidMessage: A script refused its arguments.
        redis.ReadOnlyError: Redis is a replica; kombu retries. Other passing errors go through unchanged.
    """
    try:
        yield
    except (BrokerRefused, _IsReplica):
        raise
    except redis.ReadOnlyError as error:
        raise _IsReplica(
            "Redis is a replica, because of a fail-over or because broker_url names one: name the master, or "
            f"use dq-sentinel:// (Redis says: {error})"
        ) from error
    except PASSING_ERRORS:
        raise
    except redis.ResponseError as error:
        raise _named(error) from error


@contextmanager
def refusals_as_outage() -> Iterator[None]:
    """As :func:`refusals_named`, for a connection that opens: a refusal that passes is a lost connection.

    Kombu and Celery then wait and try again, as they do for a server that does not answer.

    Raises:
        BrokerNotReady: Redis takes no writes now.
    """
    try:
        with refusals_named():
            yield
    except BrokerOverloaded as error:
        raise BrokerNotReady(str(error)) from error


def _meaning_of(error: redis.ResponseError) -> _Meaning | None:
    # redis-py removes the code from the text where it has a class for the code.
    found = f"{type(error).__name__} {error}"
    return next((meaning for meaning in _MEANINGS if meaning.pattern.search(found)), None)


def _named(error: redis.ResponseError) -> DQError:
    text = str(error)
    if text.startswith("DQINVALID"):
        return InvalidMessage(text)
    meaning = _meaning_of(error)
    if meaning is None and means_too_large(text):
        return MessageRefused(f"The request was refused: {_TOO_LARGE} (the answer: {text})")
    if meaning is None:
        return BrokerRefused(f"Redis refused the request: {text}")
    return meaning.error(f"{meaning.text} (Redis says: {text})")


@dataclass(slots=True)
class Outcome:
    """The outcome of a command: whether Redis has refused it."""

    refused: bool = False


class RefusalLog:
    """Logs that Redis refuses commands of a consuming process, which repeats them until Redis accepts them.

    One reason, such as a full disk, refuses many commands on many queues again and again. It is logged when
    it begins, and when the last refused command was accepted. Thread-safe.

    Args:
        consumer: Returns the name of the process in the leases.
    """

    def __init__(self, consumer: Callable[[], str]) -> None:
        self._consumer = consumer
        #: The reason for which a command was refused last, by the command and its queue. The flow of a
        #: message looks here before it calls :meth:`accepted`.
        self.reasons: dict[tuple[str, str], str] = {}
        self._outages: dict[str, Outage] = {}

    @contextmanager
    def watch(self, command: str, queue: str = "") -> Iterator[Outcome]:
        """Log the refusal of a command in the block, which the caller repeats about a second later.

        Args:
            command: What may be refused, e.g. ``heartbeat``.
            queue: The name of the queue, if it is about one.

        Yields:
            Whether the command was refused, once the block is over.

        Raises:
            redis.RedisError: The connection is lost, or only another one may help, as in a failover.
        """
        outcome = Outcome()
        try:
            yield outcome
        except PASSING_ERRORS:
            raise
        except redis.ResponseError as error:
            outcome.refused = True
            self.refused(command, error, queue)
        else:
            self.accepted(command, queue)

    def refused(self, command: str, error: redis.ResponseError, queue: str = "") -> None:
        """Record a refusal.

        Args:
            command: What was refused, e.g. ``heartbeat``.
            error: The answer of Redis.
            queue: The name of the queue, if it is about one.
        """
        meaning = _meaning_of(error)
        reason = str(error) if meaning is None else meaning.text
        if self.reasons.get((command, queue)) != reason:
            self.accepted(command, queue)
            self.reasons[command, queue] = reason
        self._outages.setdefault(reason, Outage(logger, "redis_refuses")).began(
            "Redis refuses commands of worker %s, the %s%s first: %s. They are sent again until Redis "
            "accepts them, and running tasks go on.",
            self._consumer(),
            command,
            f" of queue {queue}" if queue else "",
            error if isinstance(error, DQError) else _named(error),
        )

    def accepted(self, command: str, queue: str = "") -> None:
        """Record that Redis has accepted a command that it may have refused before."""
        reason = self.reasons.pop((command, queue), None) if self.reasons else None
        if reason is not None and reason not in tuple(self.reasons.values()):
            outage = self._outages.pop(reason, None)
            if outage is not None:  # else another thread has ended it at the same moment
                outage.over("Redis accepts the commands of worker %s again.", self._consumer())

    def forget(self, queue: str) -> None:
        """Remove a queue that is not consumed any more."""
        for command, name in tuple(self.reasons):
            if name == queue:
                self.accepted(command, name)
