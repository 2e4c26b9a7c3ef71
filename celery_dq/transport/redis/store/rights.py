"""The Redis commands that each use of a server needs, for ACLs, workers and ``celery dq doctor``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files

import redis

from celery_dq.keys import every_evicted, queue_registry
from celery_dq.options import Options
from celery_dq.scripts.loader import ScriptSet
from celery_dq.transport.redis.store.cluster_client import is_cluster, node_pool, slots_of
from celery_dq.transport.redis.store.script_calls import PipelinedConnection

__all__ = ["ROLES", "Role", "denied_commands"]

#: A command in a script: the first argument of a call, as in ``call('HSET', …)``.
_NAMED = re.compile(r"\('([A-Z]+)'")


@dataclass(frozen=True)
class Role:
    """One use of a Redis server, which can have a Redis user of its own.

    Attributes:
        name: the name of the role.
        purpose: the programs that use the server so.
        sent: commands that the client sends; a subcommand follows a ``|``.
        scripts: folders of Lua scripts below the package, each with the names of the scripts; without a name
            all scripts of the folder.
        keys: key patterns of the ACL, in the environment ``online`` without a ``dq_key_prefix``.
        channels: PUB/SUB patterns of the ACL, for database 0.
    """

    name: str
    purpose: str
    sent: tuple[str, ...]
    scripts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    keys: tuple[str, ...] = ("dq:*",)
    channels: tuple[str, ...] = ()

    @cached_property
    def scripted(self) -> tuple[str, ...]:
        """Commands inside the scripts, sorted: Redis asks for the right to each of them, too."""
        lines: set[str] = set()
        for folder, names in self.scripts:
            path = files("celery_dq") / folder
            found = (each.name for each in path.iterdir() if each.name.endswith(".lua"))
            scripts = ScriptSet(path, *(names or (each.removesuffix(".lua") for each in found)))
            # One after the other: the allocator would keep the memory of all lines for the life of a worker.
            for script in scripts.values():
                lines.update(script.source.splitlines())
        return tuple(sorted({name for line in lines for name in _NAMED.findall(line.split("--")[0])}))

    @property
    def commands(self) -> tuple[str, ...]:
        """All commands, sorted."""
        return tuple(sorted({*self.sent, *self.scripted}))

    def acl(self, db: int = 0, on_cluster: bool = False) -> str:
        """Return the rules for ``ACL SETUSER``, in one line.

        Args:
            db: the number of the database, which is part of the names of broadcasts.
            on_cluster: whether the user is one of the nodes of a Redis Cluster.
        """
        keys = [f"~{pattern}" for pattern in self.keys]
        if on_cluster:
            keys = [each.replace("~_kombu.", "~{_kombu}.") for each in keys]
        channels = [f"&{pattern}".replace("&/0.", f"&/{db}.") for pattern in self.channels]
        names = sorted({*self.commands, *(ON_CLUSTER if on_cluster else ())})
        commands = [f"+{command.lower()}" for command in names]
        return " ".join(["resetkeys", "resetchannels", "-@all", *keys, *channels, *commands])


#: What every role needs besides, on a Redis Cluster.
ON_CLUSTER = ("ASKING", "CLUSTER|SLOTS", "LPOP", "SPUBLISH", "SSUBSCRIBE", "SUNSUBSCRIBE")
#: Connecting, checking the server, running scripts: for every client of the broker.
_BROKER = ("EVAL", "EVALSHA", "INFO", "PING", "SELECT")
#: Declaring queues, counting their messages, reading bindings.
_DECLARE = ("EXEC", "HGET", "HLEN", "MULTI", "SADD", "SMEMBERS", "ZCARD")
#: The above, and the expiry of a producer's key at its end.
_PUBLISH = (*_BROKER, *_DECLARE, "PEXPIRE")
#: Broadcasts to workers, and the queue for their answers.
_ASK = ("BLPOP", "DEL", "LLEN", "PSUBSCRIBE", "PUBLISH", "SET", "SREM", "TIME", "ZADD")
_LEADING = ("BLPOP", "HGET", "HMGET", "TIME", "ZREM")

_QUEUES = ("transport/redis/lua", ())
_PUSH = ("push", "declare_partitions")
_ELECTION = ("leadership", ())
_BROKER_KEYS = ("dq:*", "_kombu.*")
#: The channel of runs that have lost their dedup lock.
_EVICTIONS = "dq:*"
#: Remote control, and events. Redis compares the pattern of a ``PSUBSCRIBE`` letter by letter.
_BROADCASTS = ("/0.celery.pidbox", "/0.celeryev/*")

ROLES = (
    Role(
        "publisher",
        "calls tasks: ``delay``, ``apply_async``, the buffered producer, Celery's own beat",
        _PUBLISH,
        (("transport/redis/lua", _PUSH),),
        keys=_BROKER_KEYS,
        channels=(_EVICTIONS,),
    ),
    Role(
        "control",
        "calls tasks, revokes them and asks workers: ``app.control``, ``celery inspect``, ``celery control``",
        (*_PUBLISH, *_ASK),
        (("transport/redis/lua", (*_PUSH, "cancel")),),
        keys=_BROKER_KEYS,
        channels=(_EVICTIONS, *_BROADCASTS),
    ),
    Role(
        "operator",
        "``celery dq``, ``app.dq``, ``celery purge`` and ``celery amqp``",
        (
            *(*_BROKER, *_DECLARE, "HGETALL", "HMGET", "HSCAN", "SISMEMBER", "SREM", "TIME"),
            *(
                "XADD",
                "XDEL",
                "XREVRANGE",
                "ZRANGE",
                "ZRANGEBYSCORE",
                "ZRANK",
                "ZREVRANGE",
                "ZSCAN",
                "ZSCORE",
            ),
        ),
        (_QUEUES,),
        keys=_BROKER_KEYS,
        channels=(_EVICTIONS,),
    ),
    Role(
        "worker",
        "``celery worker``; its tasks may call others, and it may lead singleton queues without ZooKeeper",
        (
            *(*_PUBLISH, *_ASK, *_LEADING, "HSCAN", "LPOP", "RPUSH", "SUBSCRIBE", "ZSCAN"),
            # The end of broadcasts in kombu since 5.7, and before.
            *("PUNSUBSCRIBE", "UNSUBSCRIBE"),
        ),
        (_QUEUES, _ELECTION),
        keys=_BROKER_KEYS,
        channels=(_EVICTIONS, every_evicted("online"), *_BROADCASTS, "/0.celeryev/worker.*"),
    ),
    Role(
        "beat",
        "``celery beat -S dq`` on ``dq-redis://`` without ZooKeeper",
        (*_PUBLISH, *_LEADING, "HKEYS"),
        (("transport/redis/lua", _PUSH), _ELECTION, ("beat", ())),
        keys=_BROKER_KEYS,
        channels=(_EVICTIONS,),
    ),
    Role(
        "election",
        "the Redis of ``dq_election``, when it is not the broker's; with it the schedule of an elected beat",
        ("EVAL", "EVALSHA", "HKEYS", "SELECT", "ZRANGEBYSCORE", *_LEADING),
        (_ELECTION, ("beat", ())),
    ),
    Role(
        "dedup",
        "the Redis of ``dq_dedup_url``, for dedup on other brokers, and ``celery dq dedup`` there",
        ("EVAL", "EVALSHA", "HGETALL", "HMGET", "PUBLISH", "SCAN", "SELECT", "SUBSCRIBE", "TIME"),
        (("other_brokers/lua", ()),),
        channels=("dq:*",),
    ),
    Role(
        "results",
        "Celery's own result backend, ``result_backend = 'redis://…'``, with chords, up to Celery 5.7",
        (
            *("DEL", "EVAL", "EVALSHA", "EXEC", "EXISTS", "EXPIRE", "GET", "INCR", "LLEN", "LRANGE", "MGET"),
            *("MULTI", "PING", "PUBLISH", "RPUSH", "SADD", "SCRIPT|LOAD", "SELECT", "SET", "SETEX"),
            *("SISMEMBER", "SUBSCRIBE", "UNSUBSCRIBE", "ZADD", "ZCOUNT", "ZRANGE"),
        ),
        keys=("celery-task-meta-*", "celery-taskset-meta-*", "chord-unlock-*"),
        # Up to Celery 5.6 the size of a chord is published, too.
        channels=("celery-task-meta-*", "celery-taskset-meta-*"),
    ),
)

#: Number of words behind a command with a fixed number or only keys. Others get a key and two more words.
_WORDS = {
    **dict.fromkeys(("TIME",), 0),
    **dict.fromkeys(
        (
            *("DEL", "EXISTS", "GET", "HGETALL", "HKEYS", "HLEN", "LLEN", "PERSIST", "SELECT", "SMEMBERS"),
            *("UNLINK", "ZCARD"),
        ),
        1,
    ),
    **dict.fromkeys(
        ("BLPOP", "HEXISTS", "HGET", "LINDEX", "PEXPIRE", "PUBLISH", "SISMEMBER", "ZRANK", "ZSCORE"), 2
    ),
}


def denied_commands(pool: redis.ConnectionPool, role: Role, options: Options) -> dict[str, str]:
    """Find the commands of a role for which a Redis user lacks the right.

    Every command is queued in a transaction, where Redis checks the rights, and the transaction is never
    executed. ``INFO`` is not tested: everything works without it.

    Args:
        pool: connections as the Redis user.
        role: the role.
        options: environment and key prefix of the keys.

    Returns:
        command, in lower case -> the answer of the server.
    """
    key = queue_registry(options.environment, options.key_prefix)
    samples: dict[str, tuple[str, ...]] = {
        "EVAL": ("return 1", "1", key),
        "EVALSHA": ("0" * 40, "1", key),
        "PSUBSCRIBE": (every_evicted(options.environment, options.key_prefix),),
        "RENAME": (key, key),
        "RPOPLPUSH": (key, key),
        "SCRIPT|LOAD": ("return 1",),
        "SUBSCRIBE": (key,),
    }
    names = {*role.commands, *(ON_CLUSTER if is_cluster(pool) else ())} - {"EXEC", "INFO", "MULTI"}
    commands = ["MULTI", *sorted(names)]
    if not is_cluster(pool):
        return _denied_by(pool, commands, samples, key)
    samples |= {"SSUBSCRIBE": (key,), "SUNSUBSCRIBE": (key,), "SPUBLISH": (key, ""), "ASKING": ()}
    samples["CLUSTER|SLOTS"] = ()
    # Each node has users of its own. It checks the rights before it looks for the node of a key.
    denied: dict[str, str] = {}
    for node in slots_of(pool).masters:
        denied = _denied_by(node_pool(pool, node), commands, samples, key) | denied
    return denied


def _denied_by(
    pool: redis.ConnectionPool, commands: Sequence[str], samples: Mapping[str, tuple[str, ...]], key: str
) -> dict[str, str]:
    """Ask one server which of these commands it denies; see :func:`denied_commands`."""
    denied = {}
    connection = PipelinedConnection(pool)
    connection.open()
    try:
        for command in commands:
            fixed = 0 if command == "MULTI" else _WORDS.get(command, 3)
            connection.send((*command.split("|"), *samples.get(command, (key, "1", "1")[:fixed])))
        for command in commands:
            refusal = _refusal(connection)
            if refusal:
                denied[command.lower()] = refusal
    finally:
        connection.close()  # without EXEC nothing has happened
    return denied


def _refusal(connection: PipelinedConnection) -> str:
    """Read an answer; return why the command was denied, or "" when it was not."""
    try:
        connection.read()
    except redis.exceptions.NoPermissionError as exc:
        return str(exc)
    except redis.ResponseError:
        pass  # the server refuses the sample arguments, not the command
    return ""
