"""Publishes messages into queues, once each.

The format of item names leaves no place for a GUID that could tell whether a create with a lost answer was
carried out. Therefore each create is one transaction with a conditional write to a node that belongs to the
producer. Sent again with the same version, the transaction either happens now, or is refused because it has
happened before.

A :class:`~celery_dq.zookeeper.idempotent_writer.IdempotentWriter` asks the server for the outcome of its
transaction. Here, another connection can continue the attempt: kombu publishes a message again on a new
connection, and the stamp (node, version) stays on the message.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from kazoo.exceptions import BadVersionError, NoAuthError, NoNodeError

from celery_dq.clock import Clock
from celery_dq.errors import ZooKeeperUnreachable
from celery_dq.per_process import PerProcess
from celery_dq.transport.zookeeper.record import BATCH_BYTES
from celery_dq.znodes import JOURNALS
from celery_dq.zookeeper.session import Session, SessionState
from celery_dq.zookeeper.transaction import (
    MAX_REQUEST,
    Step,
    TransactionRefused,
    check_size,
    create,
    failure_of,
    set_data,
    transact,
)

logger = logging.getLogger(__name__)

#: Maximum number of creates in one transaction.
LARGEST_TRANSACTION = 500
#: Bytes of a request that a message leaves free. Later requests carry the message with more data, for example
#: as a dead letter.
RESERVE = 2048
#: Seconds after which a publish raises.
GIVE_UP_S = 8.0
#: Seconds to wait for one answer.
ANSWER_S = 4.0


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


class Stamp(NamedTuple):
    """Identifies one transaction of one producer: the producer's node and the version that it expects."""

    node: str
    version: int


class _ProducerNode:
    """The node of one process: after a fork, parent and child must not write to the same node."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        #: The stamp of the next transaction; None without a node.
        self.stamp: Stamp | None = None


class ZooKeeperPublisher:
    """The producer of one connection; thread-safe.

    Args:
        session: Opened at the first publish.
        clock: Monotonic time for the deadline.
        give_up_s: Seconds after which a publish raises. Kombu may then publish again; this does not enqueue
            the message twice.
    """

    def __init__(self, session: Session, clock: Clock, give_up_s: float = GIVE_UP_S) -> None:
        self._session = session
        self._clock = clock
        self._give_up_s = give_up_s
        self._chroot = session.hosts.partition("/")[2]
        self._state = PerProcess(_ProducerNode)

    def put(self, items: Sequence[Item], stamps: dict[str, Stamp], key: str = "") -> str | None:
        """Create all of `items` in one transaction, once.

        Args:
            items: As many as fit into one transaction; see :func:`transactions`.
            stamps: Receives the stamp of an attempt that got no answer, for the next attempt.
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
        own = self._state.get()
        with own.lock:
            asked = stamps.get(key) or self._stamp(own)
            until = self._clock.monotonic() + self._give_up_s
            doubtful = key in stamps
            while True:
                try:
                    steps = [set_data(asked.node, b"", asked.version), *map(_creation, items)]
                    check_size(steps, self._chroot, limit=MAX_REQUEST - RESERVE)
                    transact(self._session, steps, min(ANSWER_S, self._give_up_s))
                except ZooKeeperUnreachable:
                    stamps[key], doubtful = asked, True
                    if self._clock.monotonic() < until:
                        continue
                    own.stamp = None
                    raise
                except TransactionRefused as refusal:
                    if refusal.index > 0:
                        if isinstance(refusal.error, NoNodeError):
                            return items[refusal.index - 1].queue
                        raise refusal.error from None
                    own.stamp = None
                    if doubtful and isinstance(refusal.error, BadVersionError):
                        # An earlier attempt was carried out, and its answer was lost.
                        return None
                    # Another process has deleted the idle node of the producer; nothing was done.
                    stamps.pop(key, None)
                    asked = self._stamp(own)
                    continue
                if own.stamp is not None and own.stamp.node == asked.node:
                    own.stamp = Stamp(asked.node, asked.version + 1)
                return None

    def _stamp(self, own: _ProducerNode) -> Stamp:
        if own.stamp is None:
            node = f"{JOURNALS}/{uuid.uuid4().hex}"
            # Without an answer, the node may exist: another process deletes it later.
            try:
                self._session.ask(lambda client: client.create_async(node, b"", makepath=True), ANSWER_S)
            except (NoAuthError, NoNodeError) as error:
                raise failure_of("create", node, error) from None
            own.stamp = Stamp(node, 0)
        return own.stamp

    def close(self) -> None:
        """Delete the producer's node: no attempt with its stamps follows."""
        own = self._state.get()
        stamp, own.stamp = own.stamp, None
        if stamp is not None and self._session.state is SessionState.CONNECTED:
            try:
                self._session.ask(lambda client: client.delete_async(stamp.node), 1.0)
            except Exception as error:
                logger.debug("Producer node %s was not deleted and stays for now: %r.", stamp.node, error)


def _creation(item: Item) -> Step:
    return create(item.prefix, item.data, sequence=True)


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
