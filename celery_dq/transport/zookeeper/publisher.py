"""Publishes messages into queues, once each.

kombu publishes a message again on a new connection after a failure. The stamp of the attempt (see
:mod:`celery_dq.zookeeper.idempotent_writer`) stays on the message, so that the new connection continues the
attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kazoo.exceptions import NoNodeError

from celery_dq.clock import Clock
from celery_dq.transport.zookeeper.record import BATCH_BYTES
from celery_dq.znodes import JOURNALS
from celery_dq.zookeeper.idempotent_writer import IdempotentWriter, Stamp
from celery_dq.zookeeper.session import Session, SessionState
from celery_dq.zookeeper.transaction import MAX_REQUEST, TransactionRefused, create

#: Maximum number of creates in one transaction.
LARGEST_TRANSACTION = 500
#: Bytes of a request that a message leaves free. Later requests carry the message with more data, for example
#: as a dead letter.
RESERVE = 2048
#: Seconds after which a publish raises.
GIVE_UP_S = 8.0
#: Seconds that closing waits for the deletion of the producer's node.
CLOSE_S = 1.0
#: In place of the stamp of a transaction that was carried out.
STORED = Stamp("", -1)


class Item(NamedTuple):
    """One node to create.

    Attributes:
        queue: Name of the queue.
        prefix: Path to which ZooKeeper appends a sequence number.
        data: Data of the node.
    """

    queue: str
    prefix: str
    data: bytes


class ZooKeeperPublisher:
    """The producer of one connection; thread-safe.

    Args:
        session: Opened at the first publish.
        clock: Monotonic time for the deadline.
        give_up_s: Seconds after which a publish raises. Kombu may then publish again; this does not enqueue
            the message twice.
    """

    def __init__(self, session: Session, clock: Clock, give_up_s: float = GIVE_UP_S) -> None:
        self._give_up_s = give_up_s
        self._session = session
        self._writer = IdempotentWriter(session, JOURNALS, clock=clock)

    def put(self, items: Sequence[Item], stamps: dict[str, Stamp], key: str = "") -> str | None:
        """Create all of `items` in one transaction, once.

        Args:
            items: As many as fit into one transaction; see :func:`transactions`.
            stamps: Receives the stamp of the attempt, for the next attempt. For items that were created,
                another attempt does nothing.
            key: The key of the stamp in `stamps`.

        Returns:
            None when the items were created. The name of a queue whose folder is missing, when nothing was
            created.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer. An attempt with the same stamps creates nothing
                twice.
            MessageTooLarge: The request would be too large; nothing was sent.
            AccessDenied: An ACL forbids this session to create one of the nodes.
        """
        if stamps.get(key) == STORED:
            return None
        steps = [create(item.prefix, item.data, sequence=True) for item in items]
        try:
            self._writer.commit_stamped(steps, self._give_up_s, stamps, key, limit=MAX_REQUEST - RESERVE)
        except TransactionRefused as refusal:
            if isinstance(refusal.error, NoNodeError):
                return items[refusal.index].queue
            raise refusal.error from None
        stamps[key] = STORED
        return None

    def close(self) -> None:
        """Delete the producer's node: no attempt with its stamps follows."""
        if self._session.state is SessionState.CONNECTED:
            self._writer.close(CLOSE_S)


def transactions(items: Sequence[Item]) -> list[Sequence[Item]]:
    """Split `items` into consecutive pieces that each fit into one transaction."""
    pieces: list[Sequence[Item]] = []
    start = size = 0
    for position, item in enumerate(items):
        carries = len(item.data) + len(item.prefix) + 100
        if position > start and (size + carries > BATCH_BYTES or position - start >= LARGEST_TRANSACTION):
            pieces.append(items[start:position])
            start, size = position, 0
        size += carries
    pieces.append(items[start:])
    return pieces
