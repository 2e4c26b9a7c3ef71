"""What is known of the nodes in a queue, and when to look again.

Reading the names of 50,000 nodes takes 60 ms, and whatever a consumer deletes sets off its own watch. So the
names are read once and handed out one by one. Whether there are *new* ones is seen from two numbers of the
folder, read in one small request: ZooKeeper counts the changes of its children and the children, and births
are half of their sum.

A queue whose new nodes are always the last ones (plain, id, simple) is read again when its names have been
handed out. One that is ordered otherwise (priority, delay) is asked for births before nodes are handed out.
A consumer with nothing to do waits for the folder's watch; where setting it would mean to read many names
again and again, it asks for births every 10 ms in the meantime.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterable
from typing import Any

from kazoo.exceptions import KazooException, NoNodeError

from celery_dq.clock import Clock
from celery_dq.curator.names import Grammar
from celery_dq.znodes import serial_distance
from celery_dq.zookeeper.session import Session
from celery_dq.zookeeper.transaction import denied

__all__ = ["Feed"]

logger = logging.getLogger(__name__)

#: A consumer reads the names again after this many times what reading takes; births it hears of at once.
PATIENCE = 5.0
#: As many names are read as quickly as one number.
FEW = 100
#: Seconds for which it does not, at most: reading may have taken long for another reason.
LONGEST_S = 0.5
#: Seconds between two questions for births.
ASK_AGAIN_S = 0.01


class Feed:
    """The nodes of one queue that nobody is known to hold. Not thread-safe, except for the watches.

    :param path: the folder of the queue; made when it is missing.
    :param grammar: how its nodes are named.
    :param bell: called, from the connection's thread, when it is worth looking again.
    :param timeout_s: seconds to wait for an answer.
    :param min_items: in a queue that reorders, look for births after this many nodes only.
    """

    def __init__(
        self,
        session: Session,
        path: str,
        grammar: Grammar,
        clock: Clock,
        bell: Callable[[], None],
        *,
        timeout_s: float,
        min_items: int = 0,
    ) -> None:
        self._session = session
        self._path = path
        self._grammar = grammar
        self._clock = clock
        self._bell = bell
        self._timeout_s = timeout_s
        self._min_items = min_items
        #: (rank, births since the pivot, due, name), a heap.
        self._waiting: list[tuple[int, int, int, str]] = []
        #: The names in it.
        self._known: set[str] = set()
        #: Held by us or by others, or unreadable: not waiting, whatever the folder says.
        self.aside: set[str] = set()
        self._pivot = 0
        self._births = (-1, -1)
        self._size = 0
        self._handed_out = 0
        #: The watch has fired since the names were read, or was lost with its connection.
        self._changed = True
        self._forgotten = True
        self._read_at = 0.0
        self._cost_s = 0.0
        self._strangers: set[str] = set()
        self._watch_number = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def forget(self) -> None:
        """Read the names again when they are needed: the connection was lost, and the watches with it."""
        self._forgotten = True

    def doubt(self) -> None:
        """Much of what was handed out was gone: read the names again, unless that was just done."""
        if self._affordable():
            self._forgotten = True

    def put_back(self, names: Iterable[str]) -> None:
        """These may be handed out again, at their old places."""
        for name in names:
            self.aside.discard(name)
            self._add(name)

    def hand_out(self, count: int) -> list[str]:
        """The first `count` names or fewer, of those that are due; the caller sets them :attr:`aside`."""
        self._look()
        if not self._due() and self._changed and self._affordable():
            # Before waiting, the watch must be set.
            self._read()
        names: list[str] = []
        while len(names) < count and self._due():
            names.append(heapq.heappop(self._waiting)[3])
        self._known.difference_update(names)
        self._handed_out += len(names)
        return names

    def pause_s(self) -> float | None:
        """Seconds until it is worth looking again when the bell stays silent; None: for ever."""
        pauses = []
        if self._changed or self._forgotten:
            pauses.append(ASK_AGAIN_S)
        if self._waiting:
            pauses.append(max(0.0, self._waiting[0][2] / 1000.0 - self._clock.wall()))
        return min(pauses, default=None)

    # -- inside

    def _due(self) -> bool:
        if not self._waiting:
            return False
        due_ms = self._waiting[0][2]
        return not due_ms or due_ms <= self._clock.wall() * 1000.0

    def _affordable(self) -> bool:
        if self._size <= FEW:
            return True
        return self._clock.monotonic() >= self._read_at + min(PATIENCE * self._cost_s, LONGEST_S)

    def _look(self) -> None:
        if self._forgotten or (not self._waiting and self._changed and self._affordable()):
            self._read()
            return
        # The watch tells a moment later than a node is there: nobody shall hear that there is none, or be
        # served before a more urgent one, because of that. A delay can wait for the watch.
        look = not self._waiting
        if self._waiting and self._grammar.reorders and self._handed_out >= self._min_items:
            look = self._changed or not self._grammar.delays
        if look:
            stat = self._ask(lambda client: client.exists_async(self._path))
            if stat is None or births(stat) != self._births:
                self._read()

    def _read(self) -> None:
        started = self._clock.monotonic()
        self._watch_number += 1
        number = self._watch_number

        def fired(_event: Any) -> None:
            if number == self._watch_number:
                self._changed = True
                self._bell()

        # Before the question: the watch may fire before the answer is read.
        self._changed = self._forgotten = False
        try:
            names, stat = self._children(fired)
        except BaseException:
            self._forgotten = True
            raise
        self._size = len(names)
        before, self._births = self._births, births(stat)
        if before[0] != self._births[0]:
            # The folder was made anew, and its names begin again: they mean other nodes now.
            self._waiting, self._known = [], set()
            self.aside.clear()
        self._handed_out = 0
        self.aside.intersection_update(names)
        self._strangers.intersection_update(names)
        fresh = [name for name in names if name not in self._known and name not in self.aside]
        there = len(names) - len(fresh) - len(self.aside)
        if len(self._known) - there > len(fresh) + there:
            # Most of what was known is gone. Otherwise whoever takes it will see.
            self._waiting, self._known = [], set()
            fresh = [name for name in names if name not in self.aside]
        for name in fresh:
            self._add(name)
        self._read_at = self._clock.monotonic()
        self._cost_s = self._read_at - started

    def _add(self, name: str) -> None:
        if name in self._known:
            return
        place = self._grammar.place(name)
        if place is None:
            self._meet(name)
            return
        if not self._waiting:
            # The births of a folder go by its counter: compare serially, from any of them.
            self._pivot = place.sequence
        distance = serial_distance(place.sequence, self._pivot)
        heapq.heappush(self._waiting, (place.rank, distance, place.due_ms, name))
        self._known.add(name)

    def _children(self, watch: Callable[[Any], None]) -> tuple[list[str], Any]:
        def ask(client: Any) -> Any:
            return client.get_children_async(self._path, watch=watch, include_data=True)

        try:
            answer: tuple[list[str], Any] = self._ask(ask)
        except NoNodeError:
            # Never made, or a container that its server removed because it was empty.
            self._ask(lambda client: client.ensure_path_async(self._path))
            answer = self._ask(ask)
        return answer

    def _ask(self, request: Callable[[Any], Any]) -> Any:
        try:
            return self._session.ask(request, self._timeout_s)
        except NoNodeError:
            raise
        except KazooException as error:
            raise denied("read", self._path, error) from None

    def _meet(self, name: str) -> None:
        if name not in self._strangers:
            self._strangers.add(name)
            logger.warning(
                "%s/%s is not a node of a %s queue: left alone. One folder holds one kind of queue.",
                self._path,
                name,
                self._grammar.kind,
            )


def births(stat: Any) -> tuple[int, int]:
    """Which folder it is (it may be made anew), and how many children it has had, modulo 2³¹; by its stat."""
    # What is told as cversion is twice the births minus the children, in 32 bits.
    changes: int = stat.cversion + stat.numChildren
    return stat.czxid, changes % 2**32 // 2
