"""The consumers of one channel, and the partitions that each of them consumes. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from celery_dq.transport.redis.store.queue import Queue


class TaggedConsumer(NamedTuple):
    """A consumer as kombu starts it.

    Attributes:
        tag: Its consumer tag.
        callback: Called with each message.
        no_ack: Whether a message is finished by its delivery.
    """

    tag: str
    callback: Callable[[Any], Any]
    no_ack: bool


class ConsumedPartitions:
    """The consumers of a channel. Several consumers of one partition take turns."""

    def __init__(self) -> None:
        #: Consumers of each partition, by the prefix of its keys.
        self._consumers: dict[str, deque[TaggedConsumer]] = {}
        self._partitions: dict[str, tuple[TaggedConsumer, tuple[Queue, ...]]] = {}

    def __bool__(self) -> bool:
        """Return whether there is a consumer, even one without a partition."""
        return bool(self._partitions)

    def tags(self) -> list[str]:
        """Return the tags of all consumers."""
        return list(self._partitions)

    def add(self, consumer: TaggedConsumer) -> None:
        """Add a consumer, which has no partition yet."""
        self._partitions[consumer.tag] = (consumer, ())

    def remove(self, tag: str) -> None:
        """Remove a consumer that has no partition any more."""
        self._partitions.pop(tag, None)

    def change(self, tag: str, partitions: Sequence[Queue]) -> tuple[list[Queue], list[Queue]]:
        """Give a consumer exactly these partitions.

        Returns:
            The partitions that have their first consumer now, and those that have lost their last one.
        """
        if tag not in self._partitions:
            return [], []
        consumer, former = self._partitions[tag]
        self._partitions[tag] = (consumer, tuple(partitions))
        kept, wanted = {each.prefix for each in former}, {each.prefix for each in partitions}
        begun, ended = [], []
        for each in partitions:
            if each.prefix not in kept:
                if each.prefix not in self._consumers:
                    begun.append(each)
                self._consumers.setdefault(each.prefix, deque()).append(consumer)
        for each in former:
            if each.prefix not in wanted:
                left = deque(other for other in self._consumers.pop(each.prefix) if other.tag != tag)
                if left:
                    self._consumers[each.prefix] = left
                else:
                    ended.append(each)
        return begun, ended

    def next_consumer(self, prefix: str) -> TaggedConsumer | None:
        """Return the consumer of a partition whose turn it is; None if no consumer has the partition."""
        consumers = self._consumers.get(prefix)
        if not consumers:
            return None
        consumers.rotate(-1)
        return consumers[-1]
