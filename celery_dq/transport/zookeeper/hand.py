"""What one connection holds under locks, and what it still has to tell the broker about it.

Nothing here blocks, because tasks end in pool threads, in greenlets and in the event loop alike: what is said
of a message goes into the outbox, and the fetcher's thread tells the broker.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from celery_dq.znodes import QueueNodes


class Verb(Enum):
    """What becomes of a held message."""

    #: It is done with: its node goes, and the lock.
    ACK = "ack"
    #: It goes back to its place, in good order.
    REQUEUE = "requeue"
    #: It goes back to its place, and whoever ran it was lost.
    CRASHED = "crashed"
    #: It becomes a dead letter.
    GIVE_UP = "give up"
    #: Nobody can read it: it is kept aside.
    BURY = "bury"


#: Verbs after which others may have it.
RETURNING = frozenset((Verb.REQUEUE, Verb.CRASHED))
#: Verbs that write the data.
WRITING = frozenset((Verb.REQUEUE, Verb.BURY, Verb.GIVE_UP))


@dataclass(eq=False)
class Held:
    """One item that is locked by us.

    Attributes:
        nodes: the queue it was taken from.
        name: of its node.
        tag: delivery tag; one for every time that a message is taken.
        data: the bytes of its node.
        returned: it was out before.
        deliveries: how often whoever had it was lost.
        worker: who had it last, if that was written down.
        marked: it is written down that we have it.
        exhausted: it was lost too often to be run again.
        letter: what it leaves as a dead letter: its name and data.
        doubtful: the broker was told, and did not answer.
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
        """The path of its node."""
        return self.nodes.item(self.name)

    @property
    def lock(self) -> str:
        """The path of its lock."""
        return self.nodes.lock(self.name)


class Hand:
    """All that one connection holds.

    Arguments:
        guid: names the session; part of every tag.
        ring: called, from any thread, when there is something to tell.
    """

    def __init__(self, guid: str, ring: Callable[[], None]) -> None:
        self._guid = guid
        self._ring = ring
        self._numbers = itertools.count(1)
        self._held: dict[str, Held] = {}
        self._locked: set[str] = set()
        self._suspects: set[str] = set()
        self._outbox: deque[tuple[Verb, Held]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def has_locked(self, lock: str) -> bool:
        """Whether the lock at this path is ours, as far as we know."""
        return lock in self._locked

    @property
    def has_suspect(self) -> bool:
        """Whether one of those held has lost its consumer before."""
        return bool(self._suspects)

    def hold(self, nodes: QueueNodes, name: str, data: bytes, returned: bool, deliveries: int = 0) -> Held:
        """Remember an item that was just locked."""
        tag = f"{self._guid}/{next(self._numbers)}"
        held = self._held[tag] = Held(nodes, name, tag, data, returned, deliveries)
        self._locked.add(held.lock)
        return held

    def suspect(self, held: Held) -> None:
        """This one will be delivered, although its consumer was lost before."""
        self._suspects.add(held.lock)

    def say(self, verb: Verb, tag: str) -> None:
        """Tell the broker what became of a message. A second word on it changes nothing."""
        held = self._held.pop(tag, None)
        if held is not None:
            self._outbox.append((verb, held))
            self._ring()

    def told(self, held: Held) -> None:
        """The broker knows."""
        self._locked.discard(held.lock)
        self._suspects.discard(held.lock)

    def untold(self, said: Iterable[tuple[Verb, Held]]) -> None:
        """The broker did not answer: it has to be told again, with care."""
        said = list(said)
        for _, held in said:
            held.doubtful = True
        self._outbox.extendleft(reversed(said))

    def take(self, limit: int, limit_bytes: int) -> list[tuple[Verb, Held]]:
        """Take what is to be told out of the outbox, oldest first; what is in doubt comes alone."""
        taken: list[tuple[Verb, Held]] = []
        size = 0
        with contextlib.suppress(IndexError):
            while len(taken) < limit and size < limit_bytes:
                verb, held = self._outbox[0]
                carries = len(held.letter[1] or held.data) if verb in WRITING else 0
                if taken and (held.doubtful or size + carries > limit_bytes):
                    break
                taken.append(self._outbox.popleft())
                size += carries
                if held.doubtful:
                    break
        return taken

    @property
    def has_news(self) -> bool:
        """There is something to tell."""
        return bool(self._outbox)

    def drop_everything(self) -> None:
        """The session is over: the locks are gone, and with them what was held."""
        self._held.clear()
        self._locked.clear()
        self._suspects.clear()
        self._outbox.clear()
