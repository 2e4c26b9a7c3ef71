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
from celery_dq.curator.queue import Base
from celery_dq.errors import ConfigurationError, InvalidMessage
from celery_dq.zookeeper.session import Session

__all__ = ["DistributedDelayQueue", "DistributedIdQueue", "DistributedQueue", "DistributedPriorityQueue"]


class DistributedQueue(Base):
    """First in, first out, as in Curator. See :class:`Base` for the options."""

    grammar = PLAIN

    def put(self, item: Any, *, timeout_s: float | None = None) -> None:
        """Put one item.

        Raises:
            QueueFull: There was no room for `timeout_s` seconds.
            ZooKeeperUnreachable: Nobody answered; the item may have been put.
            MessageTooLarge: Nothing was put.
        """
        self._put(QUEUE, [[item]], timeout_s)

    def put_multi(self, items: Sequence[Any], *, timeout_s: float | None = None) -> None:
        """Put several items in one node: they are consumed together, in order. Raises as :meth:`put`."""
        self._put(QUEUE, [items] if items else [], timeout_s)

    def put_each(self, items: Sequence[Any], *, timeout_s: float | None = None) -> None:
        """Put several items, each in a node of its own, in few round trips. Raises as :meth:`put`."""
        self._put(QUEUE, [[item] for item in items], timeout_s)


class DistributedIdQueue(Base):
    """Items with ids, by which they can be removed, as in Curator."""

    grammar = ID

    def put(self, item: Any, item_id: str, *, timeout_s: float | None = None) -> None:
        """Put one item under an id of any characters; several may share one. Raises as in a plain queue."""
        self._put(id_prefix(item_id), [[item]], timeout_s)

    def remove(self, item_id: str) -> int:
        """Remove all items with this id that nobody consumes at this moment; returns how many there were."""
        id_prefix(item_id)
        holding = self._own().holding
        return sum(holding.remove(name) for name in self._names() if id_of(name) == item_id)

    def ids(self) -> list[str]:
        """The ids of all items in the queue, in no order."""
        return [item_id for name in self._names() if (item_id := id_of(name)) is not None]

    def _names(self) -> list[str]:
        if self.size() == 0:
            return []
        names: list[str] = self.session.ask(
            lambda client: client.get_children_async(self.path), self.timeout_s
        )
        return names


class DistributedPriorityQueue(Base):
    """Items with priorities, **lower ones first**, as in Curator.

    :param min_items_before_refresh: items that may be served before one that came later and is more urgent;
        default 0. The names are read again for it, which takes 1 ms for every 1,000.
    """

    grammar = PRIORITY

    def __init__(
        self, zookeeper: Session | str, path: str, *, min_items_before_refresh: int = 0, **options: Any
    ) -> None:
        super().__init__(zookeeper, path, **options)
        if min_items_before_refresh < 0:
            raise ConfigurationError(
                f"min_items_before_refresh = {min_items_before_refresh} is unusable: give a number from 0 on"
            )
        self.min_items_before_refresh = min_items_before_refresh

    def put(self, item: Any, priority: int, *, timeout_s: float | None = None) -> None:
        """Put one item; `priority` has 32 bits and may be negative. Raises as in a plain queue."""
        self._put(priority_prefix(priority), [[item]], timeout_s)

    def put_multi(self, items: Sequence[Any], priority: int, *, timeout_s: float | None = None) -> None:
        """Put several items in one node: they are consumed together, in order."""
        self._put(priority_prefix(priority), [items] if items else [], timeout_s)


class DistributedDelayQueue(Base):
    """Items that wait until their time has come, as in Curator.

    The time is absolute, in milliseconds, and compared with the clock of the consumer's machine.
    """

    grammar = DELAY

    def put(self, item: Any, due: float | datetime, *, timeout_s: float | None = None) -> None:
        """Put one item that is served from `due` on. Raises as in a plain queue.

        :param due: seconds since 1970, or a datetime with a time zone.
        """
        self._put(delay_prefix(due_ms(due)), [[item]], timeout_s)

    def put_multi(
        self, items: Sequence[Any], due: float | datetime, *, timeout_s: float | None = None
    ) -> None:
        """Put several items in one node: they are consumed together, in order."""
        self._put(delay_prefix(due_ms(due)), [items] if items else [], timeout_s)


def due_ms(due: float | datetime) -> int:
    """`due` in milliseconds since 1970, rounded up: not before its time."""
    if isinstance(due, datetime):
        if due.tzinfo is None:
            raise InvalidMessage(f"due = {due!r} has no time zone: datetime.now(timezone.utc) has")
        due = due.timestamp()
    if isinstance(due, bool) or not isinstance(due, int | float) or not math.isfinite(due):
        raise InvalidMessage(f"due = {due!r} is unusable: give seconds since 1970 or a datetime")
    return math.ceil(due * 1000)
