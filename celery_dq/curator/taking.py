"""Taking nodes from a queue: free nodes, in order, each by one consumer.

To read the names of 50,000 nodes takes 60 ms, and each node that a consumer deletes fires the consumer's own
watch. Therefore the names are read once and returned one by one. One small request tells whether *new* nodes
exist: ZooKeeper counts the changes of a folder's children and the children, and the number of nodes ever
created (*births*) is half of their sum.

In plain, id and simple queues, new nodes are always last: the names are read again when all of them have been
returned. In priority and delay queues, new nodes may come first: births are checked before names are
returned. An idle consumer waits for the folder's watch. If setting the watch would read many names again and
again, the consumer checks births every 10 ms until the next reading.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kazoo.exceptions import KazooException, NoNodeError

from celery_dq.curator.item_ownership import ItemOwnership, Node, QueueFolder
from celery_dq.errors import ZooKeeperUnreachable
from celery_dq.shown import shown_logger
from celery_dq.znodes import serial_distance
from celery_dq.zookeeper.item_locks import FinishOutcome
from celery_dq.zookeeper.session import SessionState
from celery_dq.zookeeper.transaction import failure_of

__all__ = ["ItemTaker", "Listing"]

logger = shown_logger(__name__)

#: Minimum pause between two readings, as a multiple of the time that a reading takes.
PATIENCE = 5.0
#: A listing of at most this many names costs no more than a check of births.
FEW = 100
#: Maximum seconds of the pause between two readings; a reading may have been slow for another reason.
LONGEST_S = 0.5
#: Seconds between two checks of births.
ASK_AGAIN_S = 0.01


class Listing:
    """The nodes of one queue that are free, as far as known. Not thread-safe, except for the watches.

    Args:
        folder: The folder of the queue.
        wake: Called, in the connection's thread, when :meth:`hand_out` may find more names.
        min_items: In a priority or delay queue, the number of names to return between two checks of births.

    Attributes:
        aside: Names that are held by a consumer, or cannot be read; :meth:`hand_out` leaves them out.
    """

    def __init__(self, folder: QueueFolder, wake: Callable[[], None], min_items: int) -> None:
        self._folder = folder
        self._wake_event = wake
        self._min_items = min_items
        #: A heap of (rank, births since the pivot, due time in ms, name).
        self._waiting: list[tuple[int, int, int, str]] = []
        #: The names in the heap.
        self._known: set[str] = set()
        self.aside: set[str] = set()
        self._pivot = 0
        self._births = (-1, -1)
        self._size = 0
        self._handed_out = 0
        #: Whether the watch has fired since the names were read, or was lost with its connection.
        self._changed = True
        self._forgotten = True
        self._read_at = 0.0
        self._cost_s = 0.0
        self._strangers: set[str] = set()
        self._watch_number = 0

    def forget(self) -> None:
        """Read the names at the next call: the connection was lost, and its watches with it."""
        self._forgotten = True

    def doubt(self) -> None:
        """Read the names again, unless they were read recently: many returned names did not exist."""
        if self._affordable():
            self._forgotten = True

    def restore_names(self, names: Iterable[str]) -> None:
        """Return names to their old places in the order."""
        for name in names:
            self.aside.discard(name)
            self._add(name)

    def hand_out(self, count: int) -> list[str]:
        """Return up to `count` names that are due, in order; the caller adds them to :attr:`aside`."""
        self._look()
        if not self._due() and self._changed and self._affordable():
            # The caller is about to wait, so the watch must be set.
            self._read()
        names: list[str] = []
        while len(names) < count and self._due():
            names.append(heapq.heappop(self._waiting)[3])
        self._known.difference_update(names)
        self._handed_out += len(names)
        return names

    def pause_s(self) -> float | None:
        """Seconds until :meth:`hand_out` may find more names without a wake-up; None means never."""
        pauses = []
        if self._changed or self._forgotten:
            pauses.append(ASK_AGAIN_S)
        if self._waiting:
            pauses.append(max(0.0, self._waiting[0][2] / 1000.0 - self._folder.clock.wall()))
        return min(pauses, default=None)

    # -- inside

    def _due(self) -> bool:
        if not self._waiting:
            return False
        due_ms = self._waiting[0][2]
        return not due_ms or due_ms <= self._folder.clock.wall() * 1000.0

    def _affordable(self) -> bool:
        if self._size <= FEW:
            return True
        return self._folder.clock.monotonic() >= self._read_at + min(PATIENCE * self._cost_s, LONGEST_S)

    def _look(self) -> None:
        if self._forgotten or (not self._waiting and self._changed and self._affordable()):
            self._read()
            return
        # A watch fires a moment after its node was created. Births are checked, so that in this moment no
        # caller finds the queue empty, or gets a less urgent node. A delay queue can wait for the watch.
        look = not self._waiting
        if self._waiting and self._folder.grammar.reorders and self._handed_out >= self._min_items:
            look = self._changed or not self._folder.grammar.delays
        if look:
            stat = self._ask(lambda client: client.exists_async(self._folder.path))
            if stat is None or births(stat) != self._births:
                self._read()

    def _read(self) -> None:
        started = self._folder.clock.monotonic()
        self._watch_number += 1
        number = self._watch_number

        def fired(_event: Any) -> None:
            if number == self._watch_number:
                self._changed = True
                self._wake_event()

        # Reset before the request is sent: the watch may fire before the answer is read.
        self._changed = self._forgotten = False
        try:
            names, stat = self._children(fired)
        except BaseException:
            self._forgotten = True
            raise
        self._size = len(names)
        before, self._births = self._births, births(stat)
        if before[0] != self._births[0]:
            # The folder was created again, and its sequence has restarted: the known names are other nodes.
            self._waiting, self._known = [], set()
            self.aside.clear()
        self._handed_out = 0
        self.aside.intersection_update(names)
        self._strangers.intersection_update(names)
        fresh = [name for name in names if name not in self._known and name not in self.aside]
        there = len(names) - len(fresh) - len(self.aside)
        if len(self._known) - there > len(fresh) + there:
            # Most known names are gone: start afresh. A few missing names are noticed when they are taken.
            self._waiting, self._known = [], set()
            fresh = [name for name in names if name not in self.aside]
        for name in fresh:
            self._add(name)
        self._read_at = self._folder.clock.monotonic()
        self._cost_s = self._read_at - started

    def _add(self, name: str) -> None:
        if name in self._known:
            return
        place = self._folder.grammar.place(name)
        if place is None:
            self._meet(name)
            return
        if not self._waiting:
            # Sequence numbers wrap around: compare their serial distances from any one of them.
            self._pivot = place.sequence
        distance = serial_distance(place.sequence, self._pivot)
        heapq.heappush(self._waiting, (place.rank, distance, place.due_ms, name))
        self._known.add(name)

    def _children(self, watch: Callable[[Any], None]) -> tuple[list[str], Any]:
        def ask(client: Any) -> Any:
            return client.get_children_async(self._folder.path, watch=watch, include_data=True)

        try:
            answer: tuple[list[str], Any] = self._ask(ask)
        except NoNodeError:
            # The folder was never created, or was an empty container that the server has deleted.
            try:
                self._ask(lambda client: client.ensure_path_async(self._folder.path))
                answer = self._ask(ask)
            except NoNodeError as error:
                raise failure_of("create", self._folder.path, error) from None
        return answer

    def _ask(self, request: Callable[[Any], Any]) -> Any:
        try:
            return self._folder.session.ask(request, self._folder.timeout_s)
        except NoNodeError:
            raise
        except KazooException as error:
            raise failure_of("read", self._folder.path, error) from None

    def _meet(self, name: str) -> None:
        if name not in self._strangers:
            self._strangers.add(name)
            logger.warning(
                "%s/%s is not a node of a %s queue; it is ignored. Use one folder for one kind of queue.",
                self._folder.path,
                name,
                self._folder.grammar.kind,
                extra={"event": "curator_foreign_node"},
            )


def births(stat: Any) -> tuple[int, int]:
    """Return the identity of a folder and its births modulo 2³¹, from its stat.

    A folder that was deleted and created again has another identity.
    """
    # cversion is twice the births minus the number of children, in 32 bits.
    changes: int = stat.cversion + stat.numChildren
    return stat.czxid, changes % 2**32 // 2


#: Share of requested nodes that are gone or held by others, above which the names are read again.
MISSES = 0.5
#: Seconds between two attempts while ZooKeeper does not answer.
RETRY_S = 0.5
#: Maximum seconds of one wait for new nodes.
LONGEST_WAIT_S = 60.0


class ItemTaker:
    """Takes nodes for one consumer.

    Only one thread at a time may call :meth:`take` and :meth:`peek`; any thread may call the other methods.

    Args:
        folder: The folder of the queue.
        holding: How nodes are owned.
        wake: Set when a call of :meth:`take` may find nodes.
        min_items: See :class:`Listing`.
    """

    def __init__(
        self, folder: QueueFolder, holding: ItemOwnership, wake: threading.Event, min_items: int
    ) -> None:
        self._folder = folder
        self._listing = Listing(folder, wake.set, min_items)
        self._ownership = holding
        self._wake_event = wake
        #: Names whose ownership has ended; appended by any thread.
        self._freed: deque[str] = deque()
        #: Names of consumed nodes; appended by any thread.
        self._settled: deque[str] = deque()
        #: Names whose request for ownership got no answer.
        self._in_doubt: list[str] = []
        self._reconnected = False

    def start(self) -> None:
        """Listen to the session."""
        self._folder.session.add_listener(self._on_session_state)

    def stop(self) -> None:
        """Stop to listen to the session."""
        self._folder.session.remove_listener(self._on_session_state)

    def take(self, count: int) -> list[Node]:
        """Take up to `count` nodes; return an empty list if no node is available now.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer; the call may be repeated.
        """
        self._catch_up()
        while names := self._listing.hand_out(count):
            if nodes := self._hold(names):
                return nodes
        return []

    def take_within(self, count: int, timeout_s: float | None) -> list[Node]:
        """Take up to `count` nodes, and wait for at least one.

        Args:
            count: Maximum number of nodes.
            timeout_s: Maximum seconds to wait; None means without a limit.

        Returns:
            The nodes; an empty list after the timeout.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer until the timeout.
        """
        deadline = math.inf if timeout_s is None else self._folder.clock.monotonic() + timeout_s
        while True:
            self._wake_event.clear()
            pause: float | None
            try:
                if nodes := self.take(count):
                    return nodes
                pause = self.pause_s()
            except ZooKeeperUnreachable:
                if self._folder.clock.monotonic() >= deadline:
                    raise
                pause = RETRY_S
            left = deadline - self._folder.clock.monotonic()
            if left <= 0:
                return []
            self._wake_event.wait(min(LONGEST_WAIT_S if pause is None else pause, left))

    def peek(self) -> Node | None:
        """Return the first available node without taking it; None if there is none."""
        self._catch_up()
        passed: list[str] = []
        try:
            while names := self._listing.hand_out(1):
                passed += names
                node = self._ownership.read(names[0])
                if node is not None:
                    return node
        finally:
            self._listing.restore_names(passed)
        return None

    def pause_s(self) -> float | None:
        """Seconds after which :meth:`take` may find nodes without a wake-up; None means never."""
        if self._freed or self._in_doubt or self._reconnected:
            return 0.0
        return self._listing.pause_s()

    def settle(self, nodes: Sequence[Node], outcomes: Sequence[FinishOutcome]) -> None:
        """Record the outcomes of nodes that were finished or requeued."""
        for node, outcome in zip(nodes, outcomes, strict=True):
            if outcome is FinishOutcome.LOST:
                logger.warning(
                    "The session expired while node %s was consumed, and another consumer has locked it; its "
                    "items are consumed twice.",
                    node.name,
                    extra={"event": "curator_node_lost"},
                )
                self._freed.append(node.name)
            else:
                self._settled.append(node.name)
        self._wake_event.set()

    def release(self, nodes: Sequence[Node]) -> None:
        """Record nodes that were released."""
        self._freed.extend(node.name for node in nodes)
        self._wake_event.set()

    # -- inside

    def _hold(self, names: list[str]) -> list[Node]:
        self._listing.aside.update(names)
        try:
            grip = self._ownership.take(names)
            if grip.locked:
                free = self._ownership.watch(grip.locked, self._free)
                self._listing.restore_names(free)
        except BaseException:
            self._in_doubt += names
            raise
        missing = set(names).difference(grip.locked, grip.left, (node.name for node in grip.nodes))
        self._listing.aside.difference_update(missing)
        # A node owned by deletion is gone. Its name may appear again, in a folder that was created again.
        self._listing.aside.difference_update(node.name for node in grip.nodes if node.held is None)
        if len(missing) + len(grip.locked) > MISSES * len(names):
            self._listing.doubt()
        return grip.nodes

    def _catch_up(self) -> None:
        if self._reconnected:
            self._reconnected = False
            self._listing.forget()
        if self._in_doubt:
            self._ownership.drop(self._in_doubt)
            self._listing.restore_names(self._in_doubt)
            self._in_doubt = []
        while self._settled:
            self._listing.aside.discard(self._settled.popleft())
        if self._freed:
            freed = []
            while self._freed:
                freed.append(self._freed.popleft())
            try:
                present = self._ownership.present(freed)
            except BaseException:
                self._freed.extend(freed)
                raise
            for name in freed:
                self._listing.aside.discard(name)
            self._listing.restore_names(present)

    def _free(self, name: str) -> None:
        self._freed.append(name)
        self._wake_event.set()

    def _on_session_state(self, state: SessionState) -> None:
        # A broken connection has ended the watches.
        if state is SessionState.CONNECTED:
            self._reconnected = True
        self._wake_event.set()
