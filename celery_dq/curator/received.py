"""A node that was taken by hand."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from celery_dq.curator.decoder import Decoder
from celery_dq.curator.framing import frame
from celery_dq.curator.holding import Holding, Node
from celery_dq.curator.intake import Intake
from celery_dq.zookeeper.custody import Outcome

__all__ = ["Received"]


class Received:
    """The items of a node, held until one of :meth:`finish`, :meth:`requeue` or :meth:`release`.

    A context manager: finishes when the block ends, does what ``on_failure`` says when it raises.
    """

    def __init__(
        self, node: Node, holding: Holding, intake: Intake, decoder: Decoder, *, requeues: bool
    ) -> None:
        self._node = node
        self._holding = holding
        self._intake = intake
        self._requeues = requeues
        self._raw = decoder.raw(node.data)
        #: What was put together; one item, mostly.
        self.items: list[Any] = decoder.items(node.data)

    @property
    def item(self) -> Any:
        """The first of the items: the only one, unless they were put with ``put_multi``."""
        return self.items[0]

    @property
    def name(self) -> str:
        """The name of the node."""
        return self._node.name

    def finish(self) -> bool:
        """It is consumed; False: the session had expired and somebody else consumes it (again).

        Raises ZooKeeperUnreachable when nobody answers; call it again then.
        """
        return self._settle(self._holding.finish([self._node])[0])

    def requeue(self) -> bool:
        """Put it back, last in line, with its id, priority or due time. Otherwise as :meth:`finish`."""
        return self._settle(self._holding.requeue(self._node, frame(self._raw)))

    def release(self) -> None:
        """Give it back at its old place (without locks: last in line); raises as :meth:`finish`."""
        self._holding.release([self._node])
        self._intake.release([self._node])

    def _settle(self, outcome: Outcome) -> bool:
        self._intake.settle([self._node], [outcome])
        return outcome is not Outcome.LOST

    def __enter__(self) -> Received:
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
