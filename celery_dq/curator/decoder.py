"""Decoding the items of a node."""

from __future__ import annotations

from typing import Any

from celery_dq.curator.framing import unframe
from celery_dq.curator.serializing import Serializer
from celery_dq.errors import CorruptRecord
from celery_dq.shown import shown_logger

__all__ = ["Decoder"]

logger = shown_logger(__name__)

#: Maximum number of unreadable nodes that are logged, each once.
MANY = 20


class Decoder:
    """Decodes the items of nodes, and logs each node that it cannot decode once.

    Args:
        path: The folder of the queue, for logs.
        serializer: Decodes one item.
        framed: Whether the data of a node is in Curator's framing; otherwise it is one item.
    """

    def __init__(self, path: str, serializer: Serializer, *, framed: bool = True) -> None:
        self._path = path
        self._serializer = serializer
        self._framed = framed
        self._reported: set[str] = set()

    def raw(self, data: bytes) -> list[bytes]:
        """Return the items of a node as bytes."""
        return unframe(data) if self._framed else [data]

    def items(self, data: bytes) -> list[Any]:
        """Return the decoded items of a node."""
        return [self._serializer.deserialize(each) for each in self.raw(data)]

    def readable(self, name: str, data: bytes) -> bool:
        """Whether this consumer can decode a node; if not, the node is logged and stays in the queue."""
        try:
            self.items(data)
        except Exception as error:
            if not isinstance(error, CorruptRecord):
                logger.exception(
                    "The serializer raised an error for node %s/%s; the node stays in the queue.",
                    self._path,
                    name,
                    extra={"event": "curator_serializer_failed"},
                )
            self.pass_over(name, str(error))
            return False
        return True

    def pass_over(self, name: str, why: str) -> None:
        """Log, once per node, that this consumer leaves a node in the queue."""
        if name not in self._reported and len(self._reported) < MANY:
            self._reported.add(name)
            logger.error(
                "Node %s/%s cannot be read (%s); it stays in the queue for a consumer that can read it.",
                self._path,
                name,
                why,
                extra={"event": "curator_node_unreadable"},
            )
