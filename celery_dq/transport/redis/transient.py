"""Queues that die with their consumer: replies to remote control, results by RPC.

Such a queue (``auto_delete=True``, and ``durable=False`` or an ``x-expires``) holds
a few messages for a few seconds, for one reader. A Redis list that expires is all
it needs; leases, tenants and dead letters would only leave litter. What is taken
from it is gone, as it is when the consumer of an auto-delete queue dies.

Whoever publishes may not have declared the queue, so the consumer leaves a mark
beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty
from typing import Any

import redis
from kombu.utils.json import dumps, loads

from celery_dq.transport.redis.wire import BLPOP_SECONDS, OVERDUE_SECONDS, Wire

#: Seconds that a transient queue lives after its last message, unless x-expires says more.
SHORTEST_LIFE_S = 3600
#: Queues whose kind a channel remembers.
REMEMBERED = 10_000


class Transients:
    """The transient queues of one channel.

    Arguments:
        prefix: of all keys, with the environment.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._declared_ms: dict[str, int] = {}
        #: Of those that others have declared, the last: whoever asks a worker has a reply queue of his own.
        self._heard_of_ms: dict[str, int] = {}
        self._durable: set[str] = set()

    def key(self, queue: str) -> str:
        """LIST: messages as JSON, oldest first."""
        return f"{self._prefix}transient:{queue}"

    def mark(self, queue: str) -> str:
        """STRING: how long the list lives, in ms; there while the queue is declared."""
        return f"{self._prefix}transient-mark:{queue}"

    def declare(self, client: redis.Redis, queue: str, arguments: dict[str, Any] | None) -> None:
        """Leave the mark by which publishers know the queue; *arguments* may hold ``x-expires`` (ms)."""
        life = max(_milliseconds((arguments or {}).get("x-expires")), SHORTEST_LIFE_S * 1000)
        self._declared_ms[queue] = life
        client.set(self.mark(queue), life, px=life)

    def declare_durable(self, queue: str) -> None:
        """Remember that *queue* is an ordinary one, so that nobody has to ask."""
        if len(self._durable) < REMEMBERED:
            self._durable.add(queue)

    def knows(self, queue: str) -> bool:
        """Return whether this channel knows *queue* to be transient; asks nobody."""
        return queue in self._declared_ms or queue in self._heard_of_ms

    def holds(self, client: redis.Redis, queue: str) -> bool:
        """Return whether *queue* is transient; asks Redis about a queue never heard of."""
        if queue in self._durable:
            return False
        if self.knows(queue):
            return True
        life: Any = client.get(self.mark(queue))
        if life is None:
            self.declare_durable(queue)
            return False
        while len(self._heard_of_ms) >= REMEMBERED:
            del self._heard_of_ms[next(iter(self._heard_of_ms))]
        self._heard_of_ms[queue] = int(life)
        return True

    def put(self, client: redis.Redis, queue: str, message: dict[str, Any]) -> None:
        """Append *message*, as stock kombu would send it, to a queue that this :meth:`holds`."""
        key = self.key(queue)
        life_ms = self._declared_ms.get(queue) or self._heard_of_ms[queue]
        with client.pipeline(transaction=False) as pipe:
            pipe.rpush(key, dumps(message))
            pipe.pexpire(key, life_ms)
            pipe.execute()

    def get(self, client: redis.Redis, queue: str) -> dict[str, Any]:
        """Pop the oldest message.

        Raises:
            queue.Empty: there is none.
        """
        raw: Any = client.lpop(self.key(queue))
        if raw is None:
            raise Empty
        return self.decode(raw)

    @staticmethod
    def decode(raw: bytes) -> dict[str, Any]:
        """Return the message that :meth:`put` stored."""
        message: dict[str, Any] = loads(raw)
        return message

    def size(self, client: redis.Redis, queue: str) -> int:
        """Return how many messages wait."""
        size: Any = client.llen(self.key(queue))
        return int(size)

    def purge(self, client: redis.Redis, queue: str) -> int:
        """Remove all messages; return how many there were."""
        with client.pipeline(transaction=True) as pipe:
            pipe.llen(self.key(queue))
            pipe.delete(self.key(queue))
            return int(pipe.execute()[0])

    def delete(self, client: redis.Redis, queue: str) -> None:
        """Remove the queue with its mark."""
        client.delete(self.key(queue), self.mark(queue))
        self._declared_ms.pop(queue, None)
        self._heard_of_ms.pop(queue, None)


def _milliseconds(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0


class Listener:
    """Pops the messages of one transient queue, on a connection of its own.

    Of its own, because what a BLPOP has taken is lost with its connection: the wait for
    other queues may be called off at any time, this one only with its consumer.

    Arguments:
        key: of the list.
        deliver: called with every message as it lies there.
        pool: where the connection comes from.
    """

    def __init__(self, key: str, deliver: Callable[[bytes], None], pool: redis.ConnectionPool) -> None:
        self._key = key
        self._deliver = deliver
        self.wire = Wire(pool)
        self._since: float | None = None

    def tick(self, now: float) -> None:
        """Wait, unless waiting.

        Raises:
            redis.RedisError: the connection broke.
        """
        if self._since is None:
            self.wire.open()
            self.wire.send(("BLPOP", self._key, BLPOP_SECONDS))
            self._since = now
        elif now - self._since > BLPOP_SECONDS + OVERDUE_SECONDS and not self.wire.arrived():
            raise redis.ConnectionError(
                f"Redis has not answered a BLPOP for {now - self._since:.0f} s: the connection is dead"
            )

    def read(self) -> bool:
        """Read what has arrived; return whether it was a message."""
        answer = self.wire.read()
        self._since = None
        if answer is None:
            return False
        value = answer[1]
        self._deliver(value.encode() if isinstance(value, str) else value)
        return True

    def close(self) -> None:
        """Stop; what was just being popped is gone with the queue."""
        self._since = None
        self.wire.close()
