"""Queues that are declared in one round trip, before kombu declares them in four.

Kombu asks for the partitions and the messages of a queue, and writes its name and its binding. Here one
pipeline does it, if the app knows the queue, and kombu finds the answers. The queues of a worker are declared
together with the first of them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import redis

from celery_dq.errors import ConfigurationError
from celery_dq.transport.redis.store.partition import DepthCall
from celery_dq.transport.redis.store.partition_map import PartitionMap
from celery_dq.transport.redis.store.rounds import Rounds, run_rounds

if TYPE_CHECKING:
    from celery_dq.transport.redis.consuming_channel import ConsumingChannel
    from celery_dq.transport.redis.store.queue import Queue


class DeclaredAhead:
    """The queues and bindings that a channel has declared, and kombu has not.

    Args:
        channel: The channel.
    """

    def __init__(self, channel: ConsumingChannel) -> None:
        self._channel = channel
        self._is_done = False
        #: Number of waiting messages, by the names of the queues that kombu has not declared yet.
        self._sizes: dict[str, int] = {}
        #: Bindings that kombu has not written yet: exchange and member of its table.
        self._bindings: set[tuple[str, str]] = set()
        #: Prefixes of the partitions that stored no message.
        self._empty: set[str] = set()

    def declare_with(self, queue: str | None, passive: bool) -> None:
        """Declare a queue of the app, once with all others that the worker consumes if it is one of them.

        Args:
            queue: The queue that kombu declares.
            passive: Whether kombu only asks for it, and so needs an answer of now.

        Raises:
            redis.ConnectionError: The connection broke.
        """
        channel = self._channel
        if passive:
            self.forget(queue or "")
            return
        if queue is None or self.size(queue) is not None:
            return  # it has no name yet, or was declared with another one
        consumed = [] if self._is_done else self._consumed_with(queue)
        self._is_done = self._is_done or bool(consumed)
        queues = consumed or [channel.context.app_context.queue_named(queue)]
        suitable = [each for each in queues if each is not None and self._suits(each)]
        try:
            run_rounds(channel.client, [self._declare(each, begins=bool(consumed)) for each in suitable])
        except (redis.ResponseError, ConfigurationError):
            self.clear()  # kombu's own declaration of that queue meets the error again

    def _consumed_with(self, queue: str | None) -> list[Any]:
        """Return all queues that the worker consumes if this is one of them."""
        channel = self._channel
        consumed_queues = channel.context.state.consumed_queues
        queues = [] if consumed_queues is None else list(consumed_queues(channel.connection.client))
        return queues if any(each.name == queue for each in queues) else []

    def _suits(self, queue: Any) -> bool:
        """Return whether kombu would declare and bind a queue as :meth:`_declare` does."""
        lasts = not (queue.auto_delete or queue.expires or "x-expires" in (queue.queue_arguments or {}))
        is_plain = not (queue.no_declare or queue.bindings) and self._channel.context.is_whole(queue.name)
        return bool(lasts and is_plain and queue.exchange.name and queue.exchange.type == "direct")

    def _declare(self, queue: Any, *, begins: bool) -> Rounds[None]:
        """Declare one queue.

        Args:
            queue: A kombu queue.
            begins: Whether consumers begin now, which need not look into an empty partition.
        """
        channel, exchange = self._channel, queue.exchange.name
        member = channel.sep.join([queue.routing_key or "", "", queue.name])
        members = [
            (channel.context.registry_key, queue.name),
            (channel.keyprefix_queue % (exchange,), member),
            (channel.keyprefix_binding_permanent % (exchange,), member),
        ]
        calls = [channel.context.partition(queue.name, 0, PartitionMap()).depth()]
        leaderships = channel.context.leaderships
        # A singleton queue may have too many partitions, and is not declared then.
        later = members if leaderships is not None and leaderships.is_singleton(queue.name) else []
        put = partial(_put, members=[] if later else members, calls=calls)
        found, answers = yield from channel.context.declared(queue.name, channel.client, put)
        answers = answers[0 if later else len(members) :]
        others = [each.partition.depth() for each in found.partitions[1:]]
        if others or later:
            calls += others
            answers += (yield partial(_put, members=later, calls=others))[len(later) :]
        left, size = iter(answers), 0
        for each, call in zip(found.partitions, calls, strict=True):
            counts = [next(left) for _ in call.commands]
            size += call.parse(counts)
            if begins and not counts[0]:
                self._empty.add(each.prefix)
        self._sizes[queue.name] = size
        self._bindings.add((exchange, member))

    def size(self, queue: str) -> int | None:
        """Return how many messages wait in a queue that was declared ahead; None for other queues."""
        return self._sizes.get(queue)

    def was_empty(self, partition: Queue) -> bool:
        """Return whether a partition that was declared ahead stored no message then."""
        return partition.prefix in self._empty

    @property
    def has_empty(self) -> bool:
        """Whether :meth:`was_empty` is true of any partition."""
        return bool(self._empty)

    def forget(self, queue: str) -> None:
        """Note that kombu declares a queue by itself from now on."""
        self._sizes.pop(queue, None)

    def take_binding(self, exchange: str, member: str) -> bool:
        """Return whether a binding was written ahead, once."""
        was_written = (exchange, member) in self._bindings
        self._bindings.discard((exchange, member))
        return was_written

    def clear(self) -> None:
        """Let kombu declare all queues by itself."""
        self._sizes.clear()
        self._bindings.clear()
        self._empty.clear()


def _put(pipe: Any, *, members: list[tuple[str, str]], calls: list[DepthCall]) -> None:
    for key, member in members:
        pipe.sadd(key, member)
    for call in calls:
        for command in call.commands:
            pipe.execute_command(*command)
