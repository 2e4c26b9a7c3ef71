"""Reading the items of a node."""

from __future__ import annotations

import logging
from typing import Any

from celery_dq.curator.framing import unframe
from celery_dq.curator.serializing import Serializer
from celery_dq.errors import CorruptRecord

__all__ = ["Decoder"]

logger = logging.getLogger(__name__)

#: Nodes that are told of; where there are more, nobody reads about each.
MANY = 20


class Decoder:
    """Reads the items of a node; tells once of each node that it cannot read.

    :param framed: False: the data of a node is one item, without Curator's framing.
    """

    def __init__(self, path: str, serializer: Serializer, *, framed: bool = True) -> None:
        self._path = path
        self._serializer = serializer
        self._framed = framed
        self._told: set[str] = set()

    def raw(self, data: bytes) -> list[bytes]:
        """The items of a node as bytes."""
        return unframe(data) if self._framed else [data]

    def items(self, data: bytes) -> list[Any]:
        """The items of a node."""
        return [self._serializer.deserialize(each) for each in self.raw(data)]

    def readable(self, name: str, data: bytes) -> bool:
        """Whether this consumer can read a node. It is left in the queue if not: others may."""
        try:
            self.items(data)
        except Exception as error:
            if not isinstance(error, CorruptRecord):
                logger.exception("The serializer failed on %s/%s.", self._path, name)
            if name not in self._told and len(self._told) < MANY:
                self._told.add(name)
                logger.error(
                    "%s/%s cannot be read (%s): it stays in the queue for a consumer that can",
                    self._path,
                    name,
                    error,
                )
            return False
        return True
