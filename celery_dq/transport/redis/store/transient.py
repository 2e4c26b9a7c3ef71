"""Queues that end with their consumer: replies to remote control, results by RPC.

Such a queue (``auto_delete=True``, and ``durable=False`` or an ``x-expires``) holds a few messages for a few
seconds, for one reader. A Redis list with an expiry suffices; leases, tenants and dead letters would only
leave unused keys. A message that was taken from the list is not delivered again, as if the consumer of an
auto-delete queue had died.

A publisher may not have declared the queue, so the consumer writes a *mark*: a key beside the list.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from queue import Empty
from typing import Any

import redis
from kombu.utils.json import dumps, loads

from celery_dq.transport.redis.store.full_server import set_for
from celery_dq.transport.redis.store.script_calls import (
    BLPOP_TIMEOUT_S,
    OVERDUE_S,
    PipelinedConnection,
)

#: Shortest time, in seconds, that a transient queue is kept after its last message; x-expires may prolong it.
SHORTEST_LIFE_S = 3600
#: Maximum number of queues whose kind a channel remembers.
REMEMBERED = 10_000


class TransientQueues:
    """The transient queues of one channel.

    Args:
        prefix: Prefix of all keys, with the environment.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._declared_ms: dict[str, int] = {}
        #: Lifetimes of queues that other processes have declared. Bounded, because each client of remote
        #: control has a reply queue of its own.
        self._marked_at_ms: dict[str, int] = {}
        #: Ordinary queues, about which Redis need not be asked.
        self.durable: set[str] = set()

    def key(self, queue: str) -> str:
        """Return the key of the LIST with the messages as JSON, oldest first."""
        return f"{self._prefix}transient:{queue}"

    def mark(self, queue: str) -> str:
        """Return the key of the STRING with the list's lifetime in ms, which exists while it is declared."""
        return f"{self._prefix}transient-mark:{queue}"

    def declare(self, client: redis.Redis, queue: str, arguments: dict[str, Any] | None) -> None:
        """Write the mark by which publishers recognise the queue.

        Args:
            client: Redis client.
            queue: Name of the queue.
            arguments: Arguments of the queue, which may hold ``x-expires`` (ms).
        """
        life = max(_milliseconds((arguments or {}).get("x-expires")), SHORTEST_LIFE_S * 1000)
        self._declared_ms[queue] = life
        set_for(client, self.mark(queue), life, life)

    def declare_durable(self, queue: str) -> None:
        """Remember that *queue* is an ordinary one, so that Redis is not asked for its mark."""
        if len(self.durable) < REMEMBERED:
            self.durable.add(queue)

    def is_declared(self, queue: str) -> bool:
        """Return whether this channel knows, without asking Redis, that *queue* is transient."""
        return queue in self._declared_ms or queue in self._marked_at_ms

    def exists(self, client: redis.Redis, queue: str) -> bool:
        """Return whether *queue* is transient. Redis is asked about a queue that is not known yet."""
        if queue in self.durable:
            return False
        if self.is_declared(queue):
            return True
        life: Any = client.get(self.mark(queue))
        if life is None:
            self.declare_durable(queue)
            return False
        while len(self._marked_at_ms) >= REMEMBERED:
            del self._marked_at_ms[next(iter(self._marked_at_ms))]
        self._marked_at_ms[queue] = int(life)
        return True

    def push(self, client: redis.Redis, queue: str, message: dict[str, Any]) -> None:
        """Append *message* in the form of kombu's own Redis transport; :meth:`exists` must be true."""
        key = self.key(queue)
        life_ms = self._declared_ms.get(queue) or self._marked_at_ms[queue]
        with client.pipeline(transaction=False) as pipe:
            pipe.rpush(key, dumps(message))
            pipe.pexpire(key, life_ms)
            pipe.execute()

    def pop(self, client: redis.Redis, queue: str) -> dict[str, Any]:
        """Pop the oldest message.

        Raises:
            queue.Empty: The queue is empty.
        """
        raw: Any = client.lpop(self.key(queue))
        if raw is None:
            raise Empty
        return self.decode(raw)

    @staticmethod
    def decode(raw: bytes) -> dict[str, Any]:
        """Return the message that :meth:`push` stored."""
        message: dict[str, Any] = loads(raw)
        return message

    def size(self, client: redis.Redis, queue: str) -> int:
        """Return how many messages wait."""
        size: Any = client.llen(self.key(queue))
        return int(size)

    def purge(self, client: redis.Redis, queue: str) -> int:
        """Remove all messages; return their number."""
        # A full Redis refuses transactions.
        with client.pipeline(transaction=False) as pipe:
            pipe.llen(self.key(queue))
            pipe.delete(self.key(queue))
            return int(pipe.execute()[0])

    def delete(self, client: redis.Redis, queue: str) -> None:
        """Remove the queue with its mark."""
        with client.pipeline(transaction=False) as pipe:
            pipe.delete(self.key(queue))
            pipe.delete(self.mark(queue))  # a cluster refuses to delete keys of two slots at once
            pipe.execute()
        self._declared_ms.pop(queue, None)
        self._marked_at_ms.pop(queue, None)


def _milliseconds(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0


class TransientListener:
    """Pops the messages of one transient queue, on a connection of its own.

    A message that a BLPOP has taken is lost with its connection. The wait for wake-ups may be cancelled at
    any time, but this wait only with its consumer, so they cannot share a connection.

    Args:
        key: Key of the list.
        deliver: Called with every message as stored.
        pool: Pool that the connection is taken from.
    """

    def __init__(self, key: str, deliver: Callable[[bytes], None], pool: redis.ConnectionPool) -> None:
        self._key = key
        self.deliver = deliver
        self.connection = PipelinedConnection(pool)
        self._since: float | None = None
        #: Monotonic time until which no wait begins, after a refusal.
        self.resumes_at = -math.inf

    def tick(self, now: float) -> None:
        """Start a wait, unless one is under way.

        Args:
            now: Monotonic time.

        Raises:
            redis.RedisError: The connection broke, or the answer is overdue.
        """
        if self._since is None:
            if now < self.resumes_at:
                return
            self.connection.open()
            self.connection.send(("BLPOP", self._key, BLPOP_TIMEOUT_S))
            self._since = now
        elif now - self._since > BLPOP_TIMEOUT_S + OVERDUE_S and not self.connection.has_unread_input():
            raise redis.ConnectionError(
                f"Redis has not answered a BLPOP for {now - self._since:.0f} s: the connection is dead"
            )

    def read(self) -> bytes | None:
        """Read the answer of the wait; return the message that it brought, or None."""
        try:
            answer = self.connection.read()
        except redis.ResponseError:
            self._since = None
            raise
        self._since = None
        if answer is None:
            return None
        value: Any = answer[1]
        return value.encode() if isinstance(value, str) else bytes(value)

    @property
    def waits_after_refusal(self) -> bool:
        """Whether the next wait begins at :attr:`resumes_at`."""
        return self._since is None and self.resumes_at > -math.inf

    def close(self) -> None:
        """Close the connection. A message that was just popped is lost with the queue."""
        self._since = None
        self.connection.close()
