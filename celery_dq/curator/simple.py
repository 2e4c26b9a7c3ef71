"""A queue of bytes with the interface of Java's collections, as in Curator."""

from __future__ import annotations

from typing import Any

from celery_dq.curator.names import SIMPLE
from celery_dq.curator.queue import CuratorQueue
from celery_dq.curator.writer import Put
from celery_dq.errors import QueueEmpty
from celery_dq.zookeeper.session import Session

__all__ = ["SimpleDistributedQueue"]


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
