"""The meaning of the errors with which Redis answers commands, and their remedies.

Callers of Celery and kombu catch :exc:`kombu.exceptions.OperationalError`. The errors of redis-py are no
subclasses of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import redis
from kombu.exceptions import OperationalError

from celery_dq.errors import DQError, InvalidMessage
from celery_dq.transport.redis.store.server_checks import PASSING_ERRORS

__all__ = ["BrokerOverloaded", "BrokerRefused", "PartitionsChanging", "refusals_named"]


class BrokerRefused(DQError, OperationalError, redis.ResponseError):
    """Redis answered a publish or another request with an error. Nothing was stored."""

    # `repr` of redis-py's class has no text.
    __repr__ = Exception.__repr__


class BrokerOverloaded(BrokerRefused):
    """Redis takes no writes now: it is full, cannot save, has too few replicas, or is busy."""


class PartitionsChanging(BrokerOverloaded):
    """The number of partitions of a queue has changed; no message was stored, and sending again is safe."""


class _IsReplica(redis.ReadOnlyError):
    """Redis is a replica: kombu retries, and at last raises its own error with this text."""


class _Meaning(NamedTuple):
    """The class and text for errors whose class name and text match the pattern."""

    pattern: re.Pattern[str]
    error: type[BrokerRefused]
    text: str


_MEANINGS = (
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


def _named(error: redis.ResponseError) -> DQError:
    text = str(error)
    if text.startswith("DQINVALID"):
        return InvalidMessage(text)
    # redis-py removes the code from the text where it has a class for the code.
    found = f"{type(error).__name__} {text}"
    for meaning in _MEANINGS:
        if meaning.pattern.search(found):
            return meaning.error(f"{meaning.text} (Redis says: {text})")
    return BrokerRefused(f"Redis refused the request: {text}")
