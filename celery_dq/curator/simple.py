"""A queue of bytes in the style of Java's collections, as in Curator."""

from __future__ import annotations

from typing import Any

from celery_dq.curator.names import SIMPLE
from celery_dq.curator.queue import Base
from celery_dq.curator.writer import Put
from celery_dq.errors import QueueEmpty
from celery_dq.zookeeper.session import Session

__all__ = ["SimpleDistributedQueue"]


class SimpleDistributedQueue:
    """First in, first out, of bytes; as in ZooKeeper's own recipe. A context manager.

    An element is deleted when it is taken, and lost if its taker dies then.

    :param zookeeper: a :class:`~celery_dq.zookeeper.session.Session`, or a list of hosts for one of its own.
    :param path: the folder of the queue.
    :param timeout_s: seconds to wait for ZooKeeper; default 10.
    """

    def __init__(self, zookeeper: Session | str, path: str, *, timeout_s: float = 10.0) -> None:
        self._queue = _Elements(zookeeper, path, serializer="bytes", timeout_s=timeout_s)

    @property
    def path(self) -> str:
        """The folder of the queue."""
        return self._queue.path

    def offer(self, data: bytes) -> None:
        """Put `data` last in line.

        Raises:
            ZooKeeperUnreachable: Nobody answered; it may have been put.
            MessageTooLarge: It was not put.
        """
        self._queue.offer_each([data])

    def offer_each(self, elements: list[bytes]) -> None:
        """Put several, in few round trips. Raises as :meth:`offer`."""
        self._queue.offer_each(elements)

    def peek(self) -> bytes | None:
        """The first element, which stays; None when there is none."""
        items = self._queue.peek()
        return None if items is None else items[0]

    def element(self) -> bytes:
        """The first element, which stays. Raises QueueEmpty when there is none."""
        return self._there(self.peek())

    def poll(self, timeout_s: float = 0.0) -> bytes | None:
        """Take the first element; None when there is none for `timeout_s` seconds (default 0)."""
        received = self._queue.poll(timeout_s)
        return None if received is None else received.item

    def remove(self) -> bytes:
        """Take the first element. Raises QueueEmpty when there is none."""
        return self._there(self.poll())

    def take(self) -> bytes:
        """Take the first element; wait for one for ever."""
        data: bytes = self._queue.get().item
        return data

    def size(self) -> int:
        """How many elements there are."""
        return self._queue.size()

    def close(self) -> None:
        """Delete what is kept in ZooKeeper for this process, and end a session of its own."""
        self._queue.close()

    def __enter__(self) -> SimpleDistributedQueue:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _there(self, data: bytes | None) -> bytes:
        if data is None:
            raise QueueEmpty(f"{self._queue.path} is empty: poll() returns None then, take() waits")
        return data


class _Elements(Base):
    """The queue behind it: without framing and locks."""

    grammar = SIMPLE
    framed = False

    def offer_each(self, elements: list[Any]) -> None:
        serialize = self.serializer.serialize
        puts = [Put("qn-", serialize(each), [each]) for each in elements]
        self._own().writer.put(puts, self.timeout_s)
