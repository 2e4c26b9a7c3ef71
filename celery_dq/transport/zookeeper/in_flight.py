"""The in-flight messages of one connection, each under a lock, and their queued acknowledgements.

No method blocks, because tasks end in pool threads, in greenlets and in the event loop. An acknowledgement is
queued here, and the fetcher's thread sends it to the broker.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from celery_dq.znodes import QueueNodes


class ItemOutcome(Enum):
    """The end of an in-flight message."""

    #: Delete the item and its lock.
    ACK = "ack"
    #: Delete the lock. The delivery does not count as a lost consumer.
    REQUEUE = "requeue"
    #: Delete the lock. The delivery counts as a lost consumer.
    CRASHED = "crashed"
    #: Move the item to the dead letters.
    GIVE_UP = "give up"
    #: Move an item that cannot be decoded to the unreadable items.
    DEAD_LETTER = "dead_letter"


#: Verbs that make the item available to other consumers.
RETURNING = frozenset((ItemOutcome.REQUEUE, ItemOutcome.CRASHED))


@dataclass(eq=False)
class ClaimedItem:
    """One item that this connection has locked.

    Attributes:
        nodes: The nodes of its queue.
        name: Name of the item's node.
        tag: Delivery tag; a new one each time the item is taken.
        data: Data of the item's node.
        returned: Whether the item was taken before.
        deliveries: How many earlier consumers of the item were lost.
        worker: The last consumer of the item, if a node records it.
        marked: Whether a node records this process as the consumer of the item.
        exhausted: Whether the item has lost too many consumers to run again.
        letter: Name and data of the dead letter that the item becomes.
        doubtful: Whether an acknowledgement was sent and got no answer.
    """

    nodes: QueueNodes
    name: str
    tag: str
    data: bytes
    returned: bool
    deliveries: int = 0
    worker: str = ""
    marked: bool = False
    exhausted: bool = False
    letter: tuple[str, bytes] = ("", b"")
    doubtful: bool = False

    @property
    def item(self) -> str:
        """The path of the item's node."""
        return self.nodes.item(self.name)

    @property
    def lock(self) -> str:
        """The path of the item's lock."""
        return self.nodes.lock(self.name)


class ZooKeeperInFlight:
    """The in-flight messages of one connection.

    Args:
        guid: Identifies the session; part of every delivery tag.
        wake: Wakes the fetcher, to send an acknowledgement; called from any thread.
    """

    def __init__(self, guid: str, wake: Callable[[], None]) -> None:
        self._guid = guid
        self.wake = wake
        self._numbers = itertools.count(1)
        self._items: dict[str, ClaimedItem] = {}
        self._locked: set[str] = set()
        self._suspects: set[str] = set()
        self._returning: set[str] = set()
        self._outcomes: deque[tuple[ItemOutcome, ClaimedItem]] = deque()

    def has_locked(self, lock: str) -> bool:
        """Whether this connection holds the lock at this path, as far as it knows."""
        return lock in self._locked

    @property
    def has_suspect(self) -> bool:
        """Whether a message that lost an earlier consumer is in flight."""
        return bool(self._suspects)

    @property
    def has_returning(self) -> bool:
        """Whether a message is to be requeued and the broker has not confirmed it."""
        return bool(self._returning)

    def has_unconfirmed(self, nodes: QueueNodes) -> bool:
        """Whether a message of a queue has ended, and the broker has not confirmed it."""
        # The locks are read first, because an item is in flight before its lock is known.
        locks = [lock for lock in tuple(self._locked) if lock.startswith(nodes.lock(""))]
        in_flight = {held.lock for held in tuple(self._items.values())}
        return any(lock not in in_flight for lock in locks)

    def add(
        self, nodes: QueueNodes, name: str, data: bytes, returned: bool, deliveries: int = 0
    ) -> ClaimedItem:
        """Add an item that was just locked."""
        tag = f"{self._guid}/{next(self._numbers)}"
        held = self._items[tag] = ClaimedItem(nodes, name, tag, data, returned, deliveries)
        self._locked.add(held.lock)
        return held

    def suspect(self, held: ClaimedItem) -> None:
        """Record that a message which lost an earlier consumer is being delivered."""
        self._suspects.add(held.lock)

    def finish(self, tag: str) -> None:
        """Delete a message."""
        self.add_outcome(ItemOutcome.ACK, tag)

    def release(self, tag: str, mode: str = "unstarted") -> None:
        """Requeue a message at its place; the mode ``crashed`` counts its delivery as a lost consumer."""
        self.add_outcome(ItemOutcome.CRASHED if mode == "crashed" else ItemOutcome.REQUEUE, tag)

    def add_outcome(self, verb: ItemOutcome, tag: str) -> None:
        """Queue the end of a message for the broker. Only the first call for a tag has an effect."""
        held = self._items.pop(tag, None)
        if held is not None:
            if verb in RETURNING:
                self._returning.add(tag)
            self._outcomes.append((verb, held))
            self.wake()

    def confirm(self, held: ClaimedItem) -> None:
        """Record that the broker has confirmed the end of a message."""
        self._locked.discard(held.lock)
        self._suspects.discard(held.lock)
        self._returning.discard(held.tag)

    def restore(self, outcomes: Iterable[tuple[ItemOutcome, ClaimedItem]]) -> None:
        """Queue ends again whose request got no answer; each is sent alone, after a look at its lock."""
        outcomes = list(outcomes)
        for _, held in outcomes:
            held.doubtful = True
        self._outcomes.extendleft(reversed(outcomes))

    def take_outcomes(
        self, limit: int, limit_bytes: int, size_of: Callable[[ItemOutcome, ClaimedItem], int]
    ) -> list[tuple[ItemOutcome, ClaimedItem]]:
        """Remove queued ends, oldest first, to send them together. An end in doubt is returned alone.

        Args:
            limit: Maximum number of ends.
            limit_bytes: Maximum bytes of their request; a single end may be larger.
            size_of: Returns the bytes of the request of one end.
        """
        taken: list[tuple[ItemOutcome, ClaimedItem]] = []
        size = 0
        with contextlib.suppress(IndexError):
            while len(taken) < limit and size < limit_bytes:
                verb, held = self._outcomes[0]
                size += size_of(verb, held)
                if taken and (held.doubtful or size > limit_bytes):
                    break
                taken.append(self._outcomes.popleft())
                if held.doubtful:
                    break
        return taken

    @property
    def has_outcomes(self) -> bool:
        """Whether an end is queued."""
        return bool(self._outcomes)
