"""One queue that a connection consumes: which items are available, and how an item is taken.

An item is taken by an ephemeral lock under ``locks/`` that has the name of the item. Three events make an
item available, and nothing is polled:

* A watch on ``ready/`` fires when an item is added.
* A watch on the lock of another consumer fires when that consumer has crashed or has released its item.
* The due time of a delayed item passes.

All methods run in the fetcher's thread, except the watch callbacks and the methods in the first section.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from kazoo.exceptions import NoAuthError, NoNodeError

from celery_dq.clock import Clock
from celery_dq.errors import CorruptRecord
from celery_dq.shown import shown_logger
from celery_dq.transport.fetcher import QueueSubscription
from celery_dq.transport.zookeeper.in_flight import ClaimedItem, ZooKeeperInFlight
from celery_dq.transport.zookeeper.record import BATCH_BYTES, DeliveryCount, ZooKeeperRecord, count_of
from celery_dq.znodes import QueueNodes, due_ms_of, served_in_order
from celery_dq.zookeeper.item_locks import ItemLocks, LockedItem, WantedItem
from celery_dq.zookeeper.transaction import Step, create, delete, set_data, size_of

logger = shown_logger(__name__)

#: A changed queue is listed again after this multiple of the time that its last listing took. Urgent items
#: are found soon, and listing a long queue does not use up the time for messages.
LISTING_SHARE = 5.0
#: Maximum number of delayed items in one move.
LARGEST_MOVE = 100
#: Maximum number of other consumers' locks that are watched. Locks come and go with every item, so the watch
#: of any few of them fires soon.
MOST_WATCHES = 256
#: A queue with fewer known items is listed after every change, so that an urgent item is taken next.
SHORT = 500
#: Maximum number of denied items that are logged, each once.
MANY = 20


class Delays:
    """The delayed items of one queue: the due time of each item, and the move of due items to ``ready/``.

    Each consumer of a queue does this; each item is moved once.

    Args:
        nodes: The nodes of the queue.
        clock: Wall time for due times, monotonic time for the pace of listings.
        wake: Wakes the fetcher; called from any thread.
        pass_over: Called with the path of an item that its ACL does not let this session read.
    """

    def __init__(
        self, nodes: QueueNodes, clock: Clock, wake: Callable[[], None], pass_over: Callable[[str], None]
    ) -> None:
        self._nodes = nodes
        self._clock = clock
        self._wake = wake
        self._pass_over = pass_over
        #: Due time in milliseconds and name, the earliest first.
        self._waiting: list[tuple[int, str]] = []
        self._changed = True
        self._listed_at = 0.0
        self._listing_s = 0.0

    def next_look_s(self) -> float:
        """Seconds until an item is due or the next listing may run; infinite when neither is pending."""
        wait_s = math.inf
        if self._waiting:
            wait_s = self._waiting[0][0] / 1000 - self._clock.wall()
        if self._changed:
            listing_s = self._listed_at + LISTING_SHARE * self._listing_s - self._clock.monotonic()
            wait_s = min(wait_s, listing_s)
        return max(wait_s, 0.0)

    def move_due(self, locks: ItemLocks) -> bool:
        """Move up to `LARGEST_MOVE` items that are due.

        Args:
            locks: The locks of the consuming session.

        Returns:
            Whether any item was due.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer.
        """
        if self._changed and self._clock.monotonic() - self._listed_at >= LISTING_SHARE * self._listing_s:
            self._list(locks)
        now_ms = self._clock.wall() * 1000
        due = 0
        while due < min(len(self._waiting), LARGEST_MOVE) and self._waiting[due][0] <= now_ms:
            due += 1
        if due:
            self._move(locks, [name for _, name in self._waiting[:due]])
            del self._waiting[:due]
        return due > 0

    def look_again(self, event: Any = None) -> None:
        """List the delayed items again at the next round; callable from any thread, and as a watch."""
        self._changed = True
        self._wake()

    def _list(self, locks: ItemLocks) -> None:
        began = self._clock.monotonic()
        self._changed = False
        try:
            names = locks.ask(
                lambda client: client.get_children_async(self._nodes.delayed, watch=self.look_again)
            )
        except NoNodeError:
            self._changed = True
            restore(locks, self._nodes)
            return
        except BaseException:
            self._changed = True
            raise
        self._waiting = sorted(_due(names))
        self._listed_at = self._clock.monotonic()
        self._listing_s = self._listed_at - began

    def _move(self, locks: ItemLocks, names: Sequence[str]) -> None:
        paths = [f"{self._nodes.delayed}/{name}" for name in names]
        moves: list[list[Step]] = []
        for path, found in zip(paths, locks.read(paths), strict=True):
            if isinstance(found, NoAuthError):
                self._pass_over(path)
            elif isinstance(found, tuple):
                moves.append(_move_of(self._nodes, path, found[0]))
            elif not isinstance(found, NoNodeError):
                raise found
        while moves:
            batch = [moves.pop(0)]
            size = size_of(batch[0])
            while moves and (size := size + size_of(moves[0])) < BATCH_BYTES:
                batch.append(moves.pop(0))
            if locks.refused(locks.begin([step for move in batch for step in move])) is not None:
                # Another consumer has moved one of these items: move each in its own transaction.
                for begun in [locks.begin(move) for move in batch]:
                    locks.refused(begun)


def restore(locks: ItemLocks, nodes: QueueNodes) -> None:
    """Create the folders of a queue that was deleted."""
    for folder in nodes.folders:
        locks.ensure(folder)


def _due(names: Sequence[str]) -> list[tuple[int, str]]:
    due = []
    for name in names:
        try:
            due.append((due_ms_of(name), name))
        except (ValueError, IndexError):  # noqa: PERF203 - one bad name must not hide the others
            logger.warning(
                "A node named %r is not a delayed item; it is ignored. Delete it if it is not needed.",
                name,
                extra={"event": "zookeeper_delayed_name_invalid"},
            )
    return due


def _move_of(nodes: QueueNodes, path: str, data: bytes) -> list[Step]:
    try:
        priority = ZooKeeperRecord.unpack(data).priority
    except CorruptRecord:
        # The consumer that takes the item moves it to the unreadable items.
        priority = 0
    return [delete(path), create(nodes.ready_prefix(priority), data, sequence=True)]


class ZooKeeperSubscription(QueueSubscription):
    """The subscription of one channel to one queue.

    Args:
        queue: Name of the queue.
        channel: The channel; None for calls that take one message.
        nodes: Nodes of the queue.
        in_flight: Receives the items that were taken.
        clock: Wall time for due times, monotonic time for the pace of listings.
        wake: Wakes the fetcher; called from any thread.
        max_deliveries: How many consumers of a message may be lost before it becomes a dead letter; 0 means
            no limit.
        in_order: Whether no item may be taken before an earlier one, as in a singleton queue. The lock of a
            dead leader lasts as long as its session.
    """

    def __init__(
        self,
        queue: str,
        channel: Any,
        nodes: QueueNodes,
        in_flight: ZooKeeperInFlight,
        clock: Clock,
        wake: Callable[[], None],
        max_deliveries: int,
        in_order: bool,
    ) -> None:
        super().__init__(queue, channel, wake)
        self.nodes = nodes
        self._in_flight = in_flight
        self._clock = clock
        self._max_deliveries = max_deliveries
        self._in_order = in_order
        self._backlog: list[str] = []
        self._changed = True
        self._wanted_now = False
        self._listed_at = 0.0
        self._listing_s = 0.0
        self._others: set[str] = set()
        self._suspects: set[str] = set()
        self._watched: set[str] = set()
        self._doubtful: list[str] = []
        self._delays = Delays(nodes, clock, wake, self._pass_over)
        #: Items whose ACL denies this session, passed over until the next full look.
        self._denied: set[str] = set()
        #: Denied items that were logged.
        self._reported: set[str] = set()

    # -- called from other threads -------------------------------------------------

    def look_again(self, event: Any = None) -> None:
        """List the queue again at the next round: a watch fired, or was lost with its connection."""
        self._changed = True
        self.wake()

    def look_around(self) -> None:
        """List everything again, including denied items: no watch fires when an ACL changes."""
        self._denied = set()
        self._delays.look_again()
        self.look_again()

    def look_now(self) -> None:
        """List a long queue again at once: this process has published an item that may be more urgent."""
        self._wanted_now = True
        self.look_again()

    def item_returned(self) -> None:
        """List the queue again, at once if it is in order: an item of this connection is in its place again.

        No watch fires for the locks of this connection.
        """
        if self._in_order:
            self._wanted_now = True
        self.look_again()

    def release(self, claimed: ClaimedItem) -> None:
        """Requeue an item that was not delivered."""
        self._in_flight.release(claimed.tag)

    def _lock_is_gone(self, wanted: WantedItem) -> None:
        self._watched.discard(wanted.name)
        self.look_again()

    # -- one round ---------------------------------------------------------------

    def take_turn(self, locks: ItemLocks, room: int) -> bool:
        """Move due items to ``ready/`` and take up to `room` items into the inbox.

        Args:
            locks: The locks of the consuming session.
            room: Maximum number of items to take.

        Returns:
            Whether more items may be available now.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer. The next call finds out which locks were made.
        """
        if self._doubtful:
            room -= self._recover(locks)
        if self._delays.move_due(locks):
            self._changed = True
        if room <= 0 or (self._in_order and self._in_flight.has_returning):
            return False
        if self._should_list():
            self._list(locks)
        names = self._next(room)
        if names:
            self._take(locks, names)
            return True
        if not self._changed:
            self._watch_others(locks)
        return self._changed

    def next_look_s(self) -> float:
        """Seconds until a delayed item is due or may be listed; infinite when neither is pending."""
        return self._delays.next_look_s()

    # -- available items -----------------------------------------------------------

    def _should_list(self) -> bool:
        if not self._changed:
            return False
        if len(self._backlog) < SHORT or self._wanted_now:
            return True
        return self._clock.monotonic() - self._listed_at > LISTING_SHARE * self._listing_s

    def _list(self, locks: ItemLocks) -> None:
        began = self._clock.monotonic()
        # Reset before the request is sent: every later change fires the watch.
        self._changed = self._wanted_now = False
        try:
            names, locked = locks.ask_all(
                lambda client: [
                    client.get_children_async(self.nodes.ready, watch=self.look_again),
                    client.get_children_async(self.nodes.locks),
                ]
            )
            for answer in (names, locked):
                if isinstance(answer, Exception):
                    raise answer
        except NoNodeError:
            # The queue was deleted.
            restore(locks, self.nodes)
            self._changed = self._wanted_now = True
            return
        except BaseException:
            self._changed = self._wanted_now = True
            raise
        self._others = {name for name in locked if not self._in_flight.has_locked(self.nodes.lock(name))}
        self._others.intersection_update(names)
        self._suspects.intersection_update(names)
        served = served_in_order(names)
        if self._in_order:
            served = list(takewhile(lambda name: name not in self._others, served))
        self._backlog = [
            name
            for name in reversed(served)
            if name not in locked
            and not self._in_flight.has_locked(self.nodes.lock(name))
            and self.nodes.item(name) not in self._denied
        ]
        self._listed_at = self._clock.monotonic()
        self._listing_s = self._listed_at - began

    def _next(self, room: int) -> list[str]:
        names: list[str] = []
        while self._backlog and len(names) < room:
            if self._backlog[-1] not in self._suspects:
                names.append(self._backlog.pop())
            elif not self._in_flight.has_suspect:
                # Delivered alone, so that a crash loses no other messages.
                return names or [self._backlog.pop()]
            elif self._in_order:
                break
            else:
                self._backlog.pop()
        return names

    def _watch_others(self, locks: ItemLocks) -> None:
        """Watch locks of other consumers, whose end makes an item available."""
        missing = [name for name in self._others if name not in self._watched]
        del missing[max(MOST_WATCHES - len(self._watched), 0) :]
        if not missing:
            return
        self._watched.update(missing)
        for free in locks.watch(self._wanted(missing), self._lock_is_gone):
            self._watched.discard(free.name)
            self._changed = True

    # -- taking --------------------------------------------------------------------

    def _wanted(self, names: Sequence[str]) -> list[WantedItem]:
        return [WantedItem(self.nodes.item(name), self.nodes.lock(name)) for name in names]

    def _take(self, locks: ItemLocks, names: Sequence[str]) -> None:
        self._doubtful += names
        taken = locks.take(self._wanted(names))
        self._others.update(each.name for each in taken.locked)
        if self._in_order and taken.locked:
            self._backlog.clear()
            self._changed = True
        for each in taken.denied:
            self._pass_over(each.item)
        for held in taken.held:
            self._add_taken(locks, held, alone=len(names) == 1)
        del self._doubtful[:]

    def _recover(self, locks: ItemLocks) -> int:
        """Receive the items that were locked by requests whose answers were lost; return how many."""
        names = [name for name in self._doubtful if not self._in_flight.has_locked(self.nodes.lock(name))]
        recovered = locks.recover(self._wanted(names))
        for held in recovered:
            self._add_taken(locks, held, alone=False)
        del self._doubtful[:]
        self._changed = self._wanted_now = True
        return len(recovered)

    def _pass_over(self, item: str) -> None:
        """Leave out a denied item until the next full look; the other items of the queue are served."""
        self._denied.add(item)
        if item not in self._reported and len(self._reported) < MANY:
            self._reported.add(item)
            logger.error(
                "The ACL of %s denies this worker: the message waits, and the messages behind it are served. "
                "Change the ACL so that the worker may read the node and create and delete its children.",
                item,
                extra={"event": "zookeeper_item_denied"},
            )

    def _add_taken(self, locks: ItemLocks, item: LockedItem, alone: bool) -> None:
        count = count_of(item.stat)
        held = self._in_flight.add(self.nodes, item.name, item.data, count.taken > 1, count.deliveries)
        keeps = not count.deliveries
        try:
            keeps = keeps or self._may_keep(locks, held, count, alone)
        finally:
            if not keeps:
                self._in_flight.release(held.tag)
        if keeps:
            self.receive([held])

    def _may_keep(self, locks: ItemLocks, held: ClaimedItem, count: DeliveryCount, alone: bool) -> bool:
        """Whether to keep an item that lost an earlier consumer: it is delivered alone or dead-lettered."""
        held.exhausted = 0 < self._max_deliveries <= count.deliveries
        if not held.exhausted:
            self._suspects.add(held.name)
            if not alone or self._in_flight.has_suspect:
                return False
            self._in_flight.suspect(held)
        path = self.nodes.suspect(held.name)
        (known,) = locks.ask_all(lambda client: [client.get_async(path)])
        if isinstance(known, tuple):
            held.worker, held.marked = known[0].decode("utf-8", "replace"), True
        if not held.exhausted:
            us = f"{socket.gethostname()}:{os.getpid()}".encode()
            if not held.marked:
                locks.ensure(self.nodes.suspects)
            write = set_data if held.marked else create
            held.marked = locks.refused(locks.begin([write(path, us)])) is None
        return True
