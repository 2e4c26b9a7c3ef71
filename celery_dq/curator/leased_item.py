"""A node that was taken by hand, with :meth:`CuratorQueue.poll` or :meth:`CuratorQueue.get`."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from celery_dq.curator.decoder import Decoder
from celery_dq.curator.framing import frame
from celery_dq.curator.item_ownership import ItemOwnership, Node
from celery_dq.curator.taking import ItemTaker
from celery_dq.zookeeper.item_locks import FinishOutcome

__all__ = ["LeasedItem"]


class LeasedItem:
    """The items of a node, which is held until :meth:`finish`, :meth:`requeue` or :meth:`release` is called.

    As a context manager, it finishes the node at the end of the block. If the block raises, it finishes or
    requeues the node according to the queue's ``on_failure``.

    Attributes:
        items: The items of the node; one item unless they were put with ``put_multi``.
    """

    def __init__(
        self, node: Node, holding: ItemOwnership, item_taker: ItemTaker, decoder: Decoder, *, requeues: bool
    ) -> None:
        self._node = node
        self._ownership = holding
        self._item_taker = item_taker
        self._requeues = requeues
        self._raw = decoder.raw(node.data)
        self.items: list[Any] = decoder.items(node.data)

    @property
    def item(self) -> Any:
        """The first item; the only one unless the items were put with ``put_multi``."""
        return self.items[0]

    @property
    def name(self) -> str:
        """The name of the node."""
        return self._node.name

    def finish(self) -> bool:
        """Delete the node as consumed.

        Returns:
            False if the session had expired and another consumer has the node, so that it is consumed twice.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer; the call may be repeated.
        """
        return self._settle(self._ownership.finish([self._node])[0])

    def requeue(self) -> bool:
        """Move the node to the end of the queue, with its id, priority or due time.

        Returns:
            As :meth:`finish`.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer; the call may be repeated.
        """
        return self._settle(self._ownership.requeue(self._node, frame(self._raw)))

    def release(self) -> None:
        """Return the node to its old place, or without locks to the end of the queue.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer; the call may be repeated.
        """
        self._ownership.release([self._node])
        self._item_taker.release([self._node])

    def _settle(self, outcome: FinishOutcome) -> bool:
        self._item_taker.settle([self._node], [outcome])
        return outcome is not FinishOutcome.LOST

    def __enter__(self) -> LeasedItem:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, Exception) and not self._requeues):
            self.finish()
        else:
            self.requeue()

    def __repr__(self) -> str:
        return f"<Received {self._node.name} {self.items!r:.100}>"
