"""The four kinds of queues of items: plain, with ids, with priorities, with delays."""

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
    delay_prefix,
    id_of,
    id_prefix,
    priority_prefix,
)
from celery_dq.curator.queue import CuratorQueue
from celery_dq.errors import ConfigurationError, InvalidMessage
from celery_dq.zookeeper.session import Session

__all__ = ["DistributedDelayQueue", "DistributedIdQueue", "DistributedQueue", "DistributedPriorityQueue"]


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
