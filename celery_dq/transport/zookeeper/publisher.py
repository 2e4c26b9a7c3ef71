"""Puts messages into queues, once each.

The names of items are a queue's own, so no GUID in them could tell whether a create whose answer was lost
was carried out. Instead every create is one transaction with a write to a node of the producer's own, on
condition of its version: sent again with the same version it either happens now, or is refused because it
has happened. Unlike a :class:`~celery_dq.zookeeper.journal.Journal`, which asks what became of a transaction,
this can be continued by somebody else: kombu publishes a message again on another connection, and the stamp
(node, version) stays on the message.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from kazoo.exceptions import BadVersionError, NoAuthError, NoNodeError

from celery_dq.clock import Clock
from celery_dq.errors import ZooKeeperUnreachable
from celery_dq.transport.zookeeper.record import BATCH_BYTES
from celery_dq.znodes import JOURNALS
from celery_dq.zookeeper.session import Session, State
from celery_dq.zookeeper.transaction import (
    MAX_REQUEST,
    Refused,
    Step,
    check_size,
    create,
    denied,
    set_data,
    transact,
)

logger = logging.getLogger(__name__)

#: Creates that one transaction carries at most.
LARGEST_TRANSACTION = 500
#: Bytes that a message leaves free: what becomes of it later, dead letters included, is one request as well.
RESERVE = 2048
#: Seconds after which a publish gives up.
GIVE_UP_S = 8.0
#: Seconds that one answer is waited for.
ANSWER_S = 4.0


class Item(NamedTuple):
    """What is to be created."""

    #: Name of the queue.
    queue: str
    #: What the sequence is appended to.
    prefix: str
    data: bytes


class Stamp(NamedTuple):
    """Tells one transaction of one producer from any other."""

    node: str
    version: int


class Publisher:
    """The producer of one connection; thread-safe.

    Arguments:
        session: opened when something is published.
        clock: monotonic time, to give up by.
        give_up_s: seconds after which a publish gives up; kombu may try again, and does not enqueue twice.
    """

    def __init__(self, session: Session, clock: Clock, give_up_s: float = GIVE_UP_S) -> None:
        self._session = session
        self._clock = clock
        self._give_up_s = give_up_s
        self._chroot = session.hosts.partition("/")[2]
        self._pid = 0
        self._lock = threading.Lock()
        self._own: Stamp | None = None

    def put(self, items: Sequence[Item], stamps: dict[str, Stamp], key: str = "") -> str | None:
        """Create all of `items`, or none of them, once.

        Arguments:
            items: as many as one transaction takes.
            stamps: where the stamp of an attempt that got no answer is kept for the next one.
            key: under which name.

        Returns:
            None; or the name of a queue whose folder is not there, and then nothing was created.

        Raises:
            ZooKeeperUnreachable: No answer. Trying again with the same stamps creates nothing twice.
            MessageTooLarge: Nothing was sent.
            AccessDenied: The session may not do this.
        """
        if self._pid != os.getpid():
            # After a fork parent and child must not count in one node.
            self._pid, self._own, self._lock = os.getpid(), None, threading.Lock()
        with self._lock:
            asked = stamps.get(key) or self._stamp()
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
                    self._own = None
                    raise
                except Refused as refusal:
                    if refusal.index > 0:
                        if isinstance(refusal.error, NoNodeError):
                            return items[refusal.index - 1].queue
                        raise refusal.error from None
                    self._own = None
                    if doubtful and isinstance(refusal.error, BadVersionError):
                        # It has happened, and the answer was lost.
                        return None
                    # The node was idle for long and has been swept away; nothing was done.
                    stamps.pop(key, None)
                    asked = self._stamp()
                    continue
                if self._own is not None and self._own.node == asked.node:
                    self._own = Stamp(asked.node, asked.version + 1)
                return None

    def _stamp(self) -> Stamp:
        if self._own is None:
            node = f"{JOURNALS}/{uuid.uuid4().hex}"
            # Without an answer it may be there: whoever sweeps finds it.
            try:
                self._session.ask(lambda client: client.create_async(node, b"", makepath=True), ANSWER_S)
            except NoAuthError as error:
                raise denied("create", node, error) from None
            self._own = Stamp(node, 0)
        return self._own

    def close(self) -> None:
        """Remove the node of our own: nothing of it will be sent again."""
        own, self._own = self._own, None
        if own is not None and self._pid == os.getpid() and self._session.state is State.CONNECTED:
            try:
                self._session.ask(lambda client: client.delete_async(own.node), 1.0)
            except Exception as error:
                logger.debug("The producer's node %s stays until it is swept away: %r.", own.node, error)


def _creation(item: Item) -> Step:
    return create(item.prefix, item.data, sequence=True)


def transactions(items: Sequence[Item]) -> list[Sequence[Item]]:
    """Cut `items` into pieces that one transaction takes, in order."""
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
