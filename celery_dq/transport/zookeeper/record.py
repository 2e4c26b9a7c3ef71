"""The format of a message in a node, and the delivery count in the stat of the node.

A node holds one item in Curator's framing, so that Java peers can move it. The item, big-endian::

    B version   B priority   B flags   q due ms   I len(envelope)   envelope   body

``due`` is 0 for a message that may be served at once. Flag 1 says that the body is text.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from celery_dq.curator.framing import frame, unframe
from celery_dq.errors import CorruptRecord
from celery_dq.transport.message_record import LATEST_US, MessageRecord
from celery_dq.transport.tenant import MAX_PRIORITY
from celery_dq.zookeeper.transaction import Step, create, delete

VERSION = 1
TEXT = 1
_HEADER = struct.Struct(">BBBqI")
#: Maximum bytes of one transaction of several messages. The rest of ZooKeeper's limit is left for the chroot,
#: which is part of every path.
BATCH_BYTES = 900_000
#: Name of the child that is created and deleted in one transaction.
MARK = "taken"


@dataclass(frozen=True)
class ZooKeeperRecord:
    """One stored message in parts.

    Attributes:
        priority: 0 to 9; a higher number is more urgent.
        due_ms: The earliest time of delivery in milliseconds since the epoch; 0 means at once.
        envelope: Headers and properties; see :mod:`celery_dq.transport.in_flight`.
        body: The serialised body; ``str`` if the serializer made text.
    """

    priority: int
    due_ms: int
    envelope: bytes
    body: str | bytes

    @classmethod
    def of(cls, parts: MessageRecord) -> ZooKeeperRecord:
        """Make a record of the parts of a message."""
        # Round up: a task must not start before its ETA.
        return cls(parts.priority, -(-parts.due_us // 1000), parts.envelope, parts.body)

    def pack(self) -> bytes:
        """Return the data of the node."""
        body, flags = self.body, 0
        if isinstance(body, str):
            body, flags = body.encode("utf-8", "surrogatepass"), TEXT
        head = _HEADER.pack(VERSION, self.priority, flags, self.due_ms, len(self.envelope))
        return frame([b"".join((head, self.envelope, body))])

    @classmethod
    def unpack(cls, data: bytes) -> ZooKeeperRecord:
        """Parse the data of a node.

        Raises:
            CorruptRecord: The data is not in the format that :meth:`pack` writes.
        """
        try:
            items = unframe(data)
            if len(items) != 1:
                raise CorruptRecord(f"a stored message is one item, but its node holds {len(items)}")
            (item,) = items
            version, priority, flags, due_ms, length = _HEADER.unpack_from(item)
            if version != VERSION:
                raise CorruptRecord(f"a stored message has layout version {version}, only {VERSION} is known")
            start = _HEADER.size
            if start + length > len(item):
                raise CorruptRecord("the envelope of a stored message is longer than the message")
            if priority > MAX_PRIORITY or not 0 <= due_ms * 1000 < LATEST_US:
                raise CorruptRecord(f"a stored message has priority {priority} and is due at {due_ms} ms")
            body: str | bytes = item[start + length :]
            if flags & TEXT:
                body = item[start + length :].decode("utf-8", "surrogatepass")
            return cls(priority, due_ms, item[start : start + length], body)
        except Exception as exc:
            raise CorruptRecord.of("a stored message", exc) from exc


class DeliveryCount(NamedTuple):
    """The counts in the stat of an item that was just taken.

    A crashed consumer cannot record its crash, so the other two events are counted instead:

    * The transaction that locks an item also creates a child of the item and deletes it again. No node stays,
      but the item's ``cversion`` grows.
    * The transaction that unlocks a requeued item also writes the same data again. The item's ``version``
      grows.

    The difference is the number of lost consumers. Both counts end with the item. Java peers are not
    affected, because they use only name and data.

    Attributes:
        taken: How often the item was taken, including this time.
        deliveries: How many earlier deliveries ended with a crash or an expired session.
    """

    taken: int
    deliveries: int


def count_steps(item: str) -> list[Step]:
    """Return the steps that count a delivery of the item."""
    mark = f"{item}/{MARK}"
    return [create(mark), delete(mark)]


def count_of(stat: Any) -> DeliveryCount:
    """Read both counts; they are too low for an item that an older release without counts has taken."""
    # The server's ``cversion`` is twice the children ever created, minus those that exist now.
    taken = (stat.cversion + stat.numChildren) // 2
    return DeliveryCount(taken, max(taken - 1 - stat.version, 0))
