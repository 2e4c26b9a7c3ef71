"""One queue that a connection consumes: which items are available, and how an item is taken.

An item is taken by an ephemeral lock under ``locks/`` that has the name of the item. Three events make an
item available, and nothing is polled:

* A watch on ``ready/`` fires when an item is added.
* A watch on the lock of another consumer fires when that consumer has crashed or has released its item.
* The due time of a delayed item passes.

All methods run in the fetcher's thread, except the watch callbacks and the methods in the first section.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kazoo.exceptions import NodeExistsError, NoNodeError

from celery_dq.clock import Clock
from celery_dq.errors import AccessDenied
from celery_dq.transport.zookeeper.delays import LISTING_SHARE, Delays, restore
from celery_dq.transport.zookeeper.delivery_count import DeliveryCount, count_of, count_steps
from celery_dq.transport.zookeeper.in_flight import ClaimedItem, ItemOutcome, ZooKeeperInFlight
from celery_dq.transport.zookeeper.requests import PendingTransaction, ZooKeeperRequests
from celery_dq.znodes import QueueNodes, served_in_order
from celery_dq.zookeeper.item_locks import WantedItem, lock_steps
from celery_dq.zookeeper.transaction import Step, TransactionRefused, create, delete, set_data

logger = logging.getLogger(__name__)

#: Maximum number of items that one request takes.
LARGEST_CLAIM = 100
#: Maximum number of other consumers' locks that are watched. Locks come and go with every item, so the watch
#: of any few of them fires soon.
MOST_WATCHES = 256
#: A queue with fewer known items is listed after every change, so that an urgent item is taken next.
SHORT = 500
#: Maximum number of denied items that are logged, each once.
MANY = 20


class ZooKeeperSubscription:
    """The subscription of one channel to one queue.

    Args:
        queue: Name of the queue.
        nodes: Nodes of the queue.
        in_flight: Receives the items that were taken.
        clock: Wall time for due times, monotonic time for the pace of listings.
        wake: Wakes the fetcher; called from any thread.
        max_deliveries: How many consumers of a message may be lost before it becomes a dead letter; 0 means
            no limit.
    """

    def __init__(
        self,
        queue: str,
        nodes: QueueNodes,
        in_flight: ZooKeeperInFlight,
        clock: Clock,
        wake: Callable[[], None],
        max_deliveries: int = 0,
    ) -> None:
        self.queue = queue
        self.nodes = nodes
        #: Items taken and not delivered yet. The fetcher's thread appends, the delivering thread pops.
        self.inbox: deque[ClaimedItem] = deque()
        self._in_flight = in_flight
        self._clock = clock
        self._wake = wake
        self._max_deliveries = max_deliveries
        self._closed = False
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
        self._wake()

    def look_around(self) -> None:
        """List everything again, including denied items: no watch fires when an ACL changes."""
        self._denied = set()
        self._delays.look_again()
        self.look_again()

    def look_now(self) -> None:
        """List a long queue again at once: this process has published an item that may be more urgent."""
        self._wanted_now = True
        self.look_again()

    def close(self) -> None:
        """End the subscription and requeue the items that were not delivered."""
        self._closed = True
        self._release_inbox()

    def _release_inbox(self) -> None:
        # Two threads may do this at the same time.
        with contextlib.suppress(IndexError):
            while True:
                self._in_flight.add_outcome(ItemOutcome.REQUEUE, self.inbox.pop().tag)

    def _lock_is_gone(self, event: Any) -> None:
        self._watched.discard(str(getattr(event, "path", "")))
        if getattr(event, "path", None) is None:
            # The connection broke, and all its watches are gone.
            self._watched.clear()
        self.look_again()

    # -- one round ---------------------------------------------------------------

    def take_turn(self, requests: ZooKeeperRequests, room: int) -> bool:
        """Move due items to ``ready/`` and take up to `room` items into the inbox.

        Args:
            requests: The requests of the consuming session.
            room: Maximum number of items to take.

        Returns:
            Whether more items may be available now.

        Raises:
            ZooKeeperUnreachable: ZooKeeper did not answer. The next call finds out which locks were made.
        """
        if self._doubtful:
            self._settle_in_doubt(requests)
        if self._delays.move_due(requests):
            self._changed = True
        if room <= 0:
            return False
        if self._should_list():
            self._list(requests)
        names = self._next(min(room, LARGEST_CLAIM))
        if names:
            self._take(requests, names)
            return True
        if not self._changed:
            self._watch_others(requests)
        return self._changed

    def next_look_s(self) -> float | None:
        """Seconds until a delayed item is due or may be listed; None when neither is pending."""
        return self._delays.next_look_s()

    # -- available items -----------------------------------------------------------

    def _should_list(self) -> bool:
        if not self._changed:
            return False
        if len(self._backlog) < SHORT or self._wanted_now:
            return True
        return self._clock.monotonic() - self._listed_at > LISTING_SHARE * self._listing_s

    def _list(self, requests: ZooKeeperRequests) -> None:
        began = self._clock.monotonic()
        # Reset before the request is sent: every later change fires the watch.
        self._changed = self._wanted_now = False
        ready = requests.client.get_children_async(self.nodes.ready, watch=self.look_again)
        locks = requests.client.get_children_async(self.nodes.locks)
        try:
            names, locked = requests.wait(ready), set(requests.wait(locks))
        except NoNodeError:
            # The queue was deleted.
            restore(requests, self.nodes)
            self._changed = True
            return
        except BaseException:
            self._changed = True
            raise
        self._others = {name for name in locked if not self._in_flight.has_locked(self.nodes.lock(name))}
        self._others.intersection_update(names)
        self._suspects.intersection_update(names)
        self._backlog = [
            name
            for name in reversed(served_in_order(names))
            if name not in locked
            and not self._in_flight.has_locked(self.nodes.lock(name))
            and self.nodes.item(name) not in self._denied
        ]
        self._listed_at = self._clock.monotonic()
        self._listing_s = self._listed_at - began

    def _next(self, room: int) -> list[str]:
        names: list[str] = []
        while self._backlog and len(names) < room:
            if self._backlog[-1] in self._suspects and not self._in_flight.has_suspect:
                # Delivered alone, so that a crash loses no other messages.
                return names or [self._backlog.pop()]
            name = self._backlog.pop()
            if name not in self._suspects:
                names.append(name)
        return names

    def _watch_others(self, requests: ZooKeeperRequests) -> None:
        """Watch locks of other consumers, whose end makes an item available."""
        missing = [
            lock for lock in (self.nodes.lock(name) for name in self._others) if lock not in self._watched
        ][: max(MOST_WATCHES - len(self._watched), 0)]
        if not missing:
            return
        self._watched.update(missing)
        asked = [requests.client.exists_async(lock, watch=self._lock_is_gone) for lock in missing]
        for lock, answer in zip(missing, asked, strict=True):
            if requests.wait(answer) is None:
                # The lock is gone. The watch that remains waits for its creation and does no harm.
                self._watched.discard(lock)
                self._changed = True

    # -- taking --------------------------------------------------------------------

    def _take(self, requests: ZooKeeperRequests, names: Sequence[str]) -> None:
        items = [self.nodes.item(name) for name in names]
        self._doubtful += names
        claimed = requests.begin([step for name in names for step in self._locking(requests, name)])
        asked = requests.read_async(items)
        refusal = _refusal(requests, claimed)
        read = requests.read(asked, items)
        taken = dict.fromkeys(names, True) if refusal is None else self._take_singly(requests, names, refusal)
        for name, found in zip(names, read, strict=True):
            if taken[name]:
                self._add_taken(requests, name, found, alone=len(names) == 1)
        del self._doubtful[:]

    def _locking(self, requests: ZooKeeperRequests, name: str) -> list[Step]:
        wanted = WantedItem(self.nodes.item(name), self.nodes.lock(name))
        return [*lock_steps(wanted, requests.own), *count_steps(wanted.item)]

    def _take_singly(
        self, requests: ZooKeeperRequests, names: Sequence[str], refusal: TransactionRefused | AccessDenied
    ) -> dict[str, bool]:
        """Take each item in its own transaction, after one transaction for all was refused."""
        if len(names) == 1:
            self._skip_locked(names[0], refusal)
            return {names[0]: False}
        asked = [requests.begin(self._locking(requests, name)) for name in names]
        taken = {}
        for name, begun in zip(names, asked, strict=True):
            refused = _refusal(requests, begun)
            taken[name] = refused is None
            if refused is not None:
                self._skip_locked(name, refused)
        return taken

    def _skip_locked(self, name: str, refusal: TransactionRefused | AccessDenied) -> None:
        if isinstance(refusal, AccessDenied):
            if not refusal.path.startswith(self.nodes.item(name)):
                raise refusal
            self._pass_over(self.nodes.item(name))
        elif isinstance(refusal.error, NodeExistsError):
            self._others.add(name)
        elif not isinstance(refusal.error, NoNodeError):
            raise refusal.error
        elif refusal.index > 0:
            # The folder of the locks is missing: the queue was deleted.
            self._changed = True

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

    def _add_taken(
        self, requests: ZooKeeperRequests, name: str, found: tuple[bytes, Any] | None, alone: bool
    ) -> None:
        if found is None:
            # A peer that uses no locks has taken the item.
            requests.wait(requests.client.delete_async(self.nodes.lock(name)))
            return
        data, stat = found
        count = count_of(stat)
        held = self._in_flight.add(self.nodes, name, data, count.taken > 1, count.deliveries)
        keeps = not count.deliveries
        try:
            keeps = keeps or self._may_keep(requests, held, count, alone)
        finally:
            if not keeps:
                self._in_flight.add_outcome(ItemOutcome.REQUEUE, held.tag)
        if not keeps:
            return
        self.inbox.append(held)
        if self._closed:
            self._release_inbox()

    def _may_keep(
        self, requests: ZooKeeperRequests, held: ClaimedItem, count: DeliveryCount, alone: bool
    ) -> bool:
        """Whether to keep an item that lost an earlier consumer: it is delivered alone or dead-lettered."""
        held.exhausted = 0 < self._max_deliveries <= count.deliveries
        if not held.exhausted:
            self._suspects.add(held.name)
            if not alone or self._in_flight.has_suspect:
                return False
            self._in_flight.suspect(held)
        path = self.nodes.suspect(held.name)
        (known,) = requests.read(requests.read_async([path]), [path])
        if known is not None:
            held.worker, held.marked = known[0].decode("utf-8", "replace"), True
        if not held.exhausted:
            us = f"{socket.gethostname()}:{os.getpid()}".encode()
            if known is None:
                requests.wait(requests.client.ensure_path_async(self.nodes.suspects))
            write = set_data if held.marked else create
            held.marked = requests.refused(requests.begin([write(path, us)])) is None
        return True

    def _settle_in_doubt(self, requests: ZooKeeperRequests) -> None:
        """Delete locks that were made by requests whose answers were lost."""
        names = [name for name in self._doubtful if not self._in_flight.has_locked(self.nodes.lock(name))]
        for name in names:
            lock = self.nodes.lock(name)
            stat = requests.wait(requests.client.exists_async(lock))
            if stat is not None and stat.ephemeralOwner == requests.session_id:
                item = self.nodes.item(name)
                (found,) = requests.read(requests.read_async([item]), [item])
                # No consumer was lost, so the write counts the return in good order.
                kept = [] if found is None else [set_data(item, found[0])]
                if requests.refused(requests.begin([*kept, delete(lock)])) is not None:
                    requests.refused(requests.begin([delete(lock)]))
        del self._doubtful[:]
        self._changed = True


def _refusal(
    requests: ZooKeeperRequests, begun: PendingTransaction
) -> TransactionRefused | AccessDenied | None:
    try:
        return requests.refused(begun)
    except AccessDenied as denial:
        return denial
