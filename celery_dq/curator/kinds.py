"""The kinds of queues: items alone, with ids, priorities or due times; and bytes as in Java's collections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from celery_dq.curator.names import (
    DELAY,
    ID,
    PLAIN,
    PRIORITY,
    QUEUE,
    SIMPLE,
    delay_prefix,
    id_of,
    id_prefix,
    priority_prefix,
)
from celery_dq.curator.queue import CuratorQueue
from celery_dq.curator.writer import Put
from celery_dq.errors import ConfigurationError, InvalidMessage, QueueEmpty
from celery_dq.zookeeper.session import Session


class DistributedQueue(CuratorQueue):
    """A first-in, first-out queue of items, as in Curator; see :class:`CuratorQueue` for the options."""

    grammar = PLAIN

    def put(self, item: Any, *, timeout_s: float | None = None) -> None:
        """Put one item.

        Args:
            item: The item.
            timeout_s: Seconds to wait for room and for ZooKeeper; default: the queue's `timeout_s`.

        Raises:
            QueueFull: The queue stayed full for `timeout_s` seconds.
            ZooKeeperUnreachable: ZooKeeper did not answer; the item may have been put.
            MessageTooLarge: The item is too large and was not put.
        """
        self._put(QUEUE, [[item]], timeout_s)

    def put_multi(self, items: Sequence[Any], *, timeout_s: float | None = None) -> None:
        """Put several items in one node, to be consumed together and in order; raises as :meth:`put`."""
        self._put(QUEUE, [items] if items else [], timeout_s)

    def put_each(self, items: Sequence[Any], *, timeout_s: float | None = None) -> None:
        """Put several items in separate nodes, in few round trips; raises as :meth:`put`."""
        self._put(QUEUE, [[item] for item in items], timeout_s)


class DistributedIdQueue(CuratorQueue):
    """A queue of items with ids, by which they can be removed, as in Curator."""

    grammar = ID

    def put(self, item: Any, item_id: str, *, timeout_s: float | None = None) -> None:
        """Put one item with an id.

        Args:
            item: The item.
            item_id: Any non-empty text. Several items may have the same id.
            timeout_s: Seconds to wait for room and for ZooKeeper; default: the queue's `timeout_s`.

        Raises:
            InvalidMessage: `item_id` is invalid.
            QueueFull: The queue stayed full for `timeout_s` seconds.
            ZooKeeperUnreachable: ZooKeeper did not answer; the item may have been put.
            MessageTooLarge: The item is too large and was not put.
        """
        self._put(id_prefix(item_id), [[item]], timeout_s)

    def remove(self, item_id: str) -> int:
        """Remove all items with this id that no consumer holds; return how many were removed."""
        id_prefix(item_id)
        holding = self._state.get().ownership
        return sum(holding.remove(name) for name in self._names() if id_of(name) == item_id)

    def ids(self) -> list[str]:
        """Return the ids of all items in the queue, unordered."""
        return [item_id for name in self._names() if (item_id := id_of(name)) is not None]

    def _names(self) -> list[str]:
        if self.size() == 0:
            return []
        names: list[str] = self.session.ask(
            lambda client: client.get_children_async(self.path), self.timeout_s
        )
        return names


class DistributedPriorityQueue(CuratorQueue):
    """A queue of items with priorities, **lower ones first**, as in Curator.

    Args:
        zookeeper: As for :class:`CuratorQueue`.
        path: As for :class:`CuratorQueue`.
        min_items_before_refresh: Number of items that may be served before a later, more urgent one;
            default 0. A smaller number causes more readings of the names, each about 1 ms per 1,000 names.
        **options: The other options of :class:`CuratorQueue`.
    """

    grammar = PRIORITY

    def __init__(
        self, zookeeper: Session | str, path: str, *, min_items_before_refresh: int = 0, **options: Any
    ) -> None:
        super().__init__(zookeeper, path, **options)
        if min_items_before_refresh < 0:
            raise ConfigurationError(
                f"min_items_before_refresh = {min_items_before_refresh} is invalid: give an integer from 0 on"
            )
        self.min_items_before_refresh = min_items_before_refresh

    def put(self, item: Any, priority: int, *, timeout_s: float | None = None) -> None:
        """Put one item with a priority.

        Args:
            item: The item.
            priority: A 32-bit integer; may be negative.
            timeout_s: Seconds to wait for room and for ZooKeeper; default: the queue's `timeout_s`.

        Raises:
            InvalidPriority: `priority` is not an integer, or out of range.
            QueueFull: The queue stayed full for `timeout_s` seconds.
            ZooKeeperUnreachable: ZooKeeper did not answer; the item may have been put.
            MessageTooLarge: The item is too large and was not put.
        """
        self._put(priority_prefix(priority), [[item]], timeout_s)

    def put_multi(self, items: Sequence[Any], priority: int, *, timeout_s: float | None = None) -> None:
        """Put several items in one node, to be consumed together and in order; raises as :meth:`put`."""
        self._put(priority_prefix(priority), [items] if items else [], timeout_s)


class DistributedDelayQueue(CuratorQueue):
    """A queue of items with due times, as in Curator.

    A due time is absolute, in milliseconds, and compared with the clock of the consumer's machine.
    """

    grammar = DELAY

    def put(self, item: Any, due: float | datetime, *, timeout_s: float | None = None) -> None:
        """Put one item that is served from its due time on.

        Args:
            item: The item.
            due: Seconds since 1970, or a datetime with a time zone.
            timeout_s: Seconds to wait for room and for ZooKeeper; default: the queue's `timeout_s`.

        Raises:
            InvalidMessage: `due` is invalid.
            QueueFull: The queue stayed full for `timeout_s` seconds.
            ZooKeeperUnreachable: ZooKeeper did not answer; the item may have been put.
            MessageTooLarge: The item is too large and was not put.
        """
        self._put(delay_prefix(due_ms(due)), [[item]], timeout_s)

    def put_multi(
        self, items: Sequence[Any], due: float | datetime, *, timeout_s: float | None = None
    ) -> None:
        """Put several items in one node, to be consumed together and in order; raises as :meth:`put`."""
        self._put(delay_prefix(due_ms(due)), [items] if items else [], timeout_s)


def due_ms(due: float | datetime) -> int:
    """Convert a due time to milliseconds since 1970, rounded up so that no item is served early.

    Raises:
        InvalidMessage: `due` is not a finite number, or a datetime without a time zone.
    """
    if isinstance(due, datetime):
        if due.tzinfo is None:
            raise InvalidMessage(f"due = {due!r} has no time zone: use datetime.now(timezone.utc)")
        due = due.timestamp()
    if isinstance(due, bool) or not isinstance(due, int | float) or not math.isfinite(due):
        raise InvalidMessage(f"due = {due!r} is invalid: give seconds since 1970 or a datetime")
    return math.ceil(due * 1000)


class SimpleDistributedQueue:
    """A first-in, first-out queue of bytes, as in ZooKeeper's recipe. A context manager.

    An element is deleted when it is taken. It is lost if the consumer dies before it has processed it.

    Args:
        zookeeper: A :class:`~celery_dq.zookeeper.session.Session`, or a list of hosts for a session that the
            queue opens and closes.
        path: The folder of the queue.
        timeout_s: Seconds to wait for ZooKeeper; default 10.
    """

    def __init__(self, zookeeper: Session | str, path: str, *, timeout_s: float = 10.0) -> None:
        self._queue = _Elements(zookeeper, path, serializer="bytes", timeout_s=timeout_s)

    @property
    def path(self) -> str:
        """The folder of the queue."""
        return self._queue.path

    def offer(self, data: bytes) -> None:
        """Add `data` at the end of the queue.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer; the element may have been added.
            MessageTooLarge: The element is too large and was not added.
        """
        self._queue.offer_each([data])

    def offer_each(self, elements: list[bytes]) -> None:
        """Add several elements in few round trips; raises as :meth:`offer`."""
        self._queue.offer_each(elements)

    def peek(self) -> bytes | None:
        """Return the first element without taking it; None if the queue is empty."""
        items = self._queue.peek()
        return None if items is None else items[0]

    def element(self) -> bytes:
        """Return the first element without taking it.

        Raises:
            QueueEmpty: The queue is empty.
        """
        return self._there(self.peek())

    def poll(self, timeout_s: float = 0.0) -> bytes | None:
        """Take the first element; None if the queue stays empty for `timeout_s` seconds (default 0)."""
        received = self._queue.poll(timeout_s)
        return None if received is None else received.item

    def remove(self) -> bytes:
        """Take the first element.

        Raises:
            QueueEmpty: The queue is empty.
        """
        return self._there(self.poll())

    def take(self) -> bytes:
        """Take the first element; wait for it without a limit."""
        data: bytes = self._queue.get().item
        return data

    def size(self) -> int:
        """Return the number of elements."""
        return self._queue.size()

    def close(self) -> None:
        """Delete this process's own nodes in ZooKeeper, and end a session that the queue has opened."""
        self._queue.close()

    def __enter__(self) -> SimpleDistributedQueue:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _there(self, data: bytes | None) -> bytes:
        if data is None:
            raise QueueEmpty(
                f"queue {self._queue.path} is empty: use poll(), which returns None, or take(), which waits"
            )
        return data


class _Elements(CuratorQueue):
    """The queue of nodes for the elements, without framing and locks."""

    grammar = SIMPLE
    framed = False

    def offer_each(self, elements: list[Any]) -> None:
        serialize = self.serializer.serialize
        puts = [Put("qn-", serialize(each), [each]) for each in elements]
        self._state.get().writer.put(puts, self.timeout_s)
