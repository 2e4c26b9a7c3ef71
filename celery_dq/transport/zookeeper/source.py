"""One queue that a connection consumes: what it offers, and how an item is taken.

An item is taken by an ephemeral lock under ``locks/``, named as the item. Three things tell that there is
something to take: a watch on ``ready/`` (something came), watches on the locks of others that were passed
over (their owner crashed or gave an item back), and the time (something delayed is due). Nothing is polled.

Everything here runs in the fetcher's thread, except the watches and what is said to be safe.
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
from celery_dq.errors import CorruptRecord
from celery_dq.transport.zookeeper.counting import Count, count_of, count_steps
from celery_dq.transport.zookeeper.hand import Hand, Held, Verb
from celery_dq.transport.zookeeper.record import BATCH_BYTES, Record
from celery_dq.transport.zookeeper.talk import Talk
from celery_dq.znodes import QueueNodes, due_ms_of, served_in_order
from celery_dq.zookeeper.custody import Wanted, lock_steps
from celery_dq.zookeeper.transaction import Refused, Step, create, delete, set_data

logger = logging.getLogger(__name__)

#: Items that one request takes at most.
LARGEST_CLAIM = 100
#: Locks of others that are watched at most. Their owners change with every item, so a few would do.
MOST_WATCHES = 256
#: A queue of so many items is listed whenever it has changed: what is urgent comes next.
SHORT = 500
#: A longer one is listed again, while there is something left of the last listing, only after so many times
#: the time that listing it took: what is urgent is found soon, and the rest of the time goes into messages.
LISTING_SHARE = 5.0
#: Delayed items that are moved at a time.
LARGEST_MOVE = 100


class Source:
    """What one channel consumes of one queue.

    Arguments:
        queue: its name.
        nodes: its nodes.
        hand: where what was taken is remembered.
        clock: tells when something is due.
        ring: wakes the fetcher, from any thread.
        max_deliveries: how often a message's consumer may be lost before it is given up on; 0: as often as
            it will.
    """

    def __init__(
        self,
        queue: str,
        nodes: QueueNodes,
        hand: Hand,
        clock: Clock,
        ring: Callable[[], None],
        max_deliveries: int = 0,
    ) -> None:
        self.queue = queue
        self.nodes = nodes
        #: Taken and not delivered yet. Appended here, popped by whoever delivers.
        self.inbox: deque[Held] = deque()
        self._hand = hand
        self._clock = clock
        self._ring = ring
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
        self._delays: list[tuple[int, str]] = []
        self._delays_changed = True
        self._delays_listed_at = 0.0
        self._delays_listing_s = 0.0

    # -- told from other threads -------------------------------------------------

    def look_again(self, event: Any = None) -> None:
        """Something came or went, or the connection broke and took the watch with it."""
        self._changed = True
        self._ring()

    def look_now(self) -> None:
        """We have put something there ourselves: it may be more urgent than what is known."""
        self._wanted_now = True
        self.look_again()

    def close(self) -> None:
        """Nobody consumes this any more: what was not delivered goes back."""
        self._closed = True
        self._give_back()

    def _give_back(self) -> None:
        # Two threads may be at it.
        with contextlib.suppress(IndexError):
            while True:
                self._hand.say(Verb.REQUEUE, self.inbox.pop().tag)

    def _delays_look_again(self, event: Any = None) -> None:
        self._delays_changed = True
        self._ring()

    def _lock_is_gone(self, event: Any) -> None:
        self._watched.discard(str(getattr(event, "path", "")))
        if getattr(event, "path", None) is None:
            # The connection broke, and all watches with it.
            self._watched.clear()
        self.look_again()

    # -- one round ---------------------------------------------------------------

    def turn(self, talk: Talk, room: int) -> bool:
        """Move what is due, and take up to `room` items; return whether there may be more right now.

        Raises:
            ZooKeeperUnreachable: No answer. What was asked for and not answered is cleared up next time.
        """
        if self._doubtful:
            self._clear_doubts(talk)
        self._move_what_is_due(talk)
        if room <= 0:
            return False
        if self._should_list():
            self._list(talk)
        names = self._next(min(room, LARGEST_CLAIM))
        if names:
            self._take(talk, names)
            return True
        if not self._changed:
            self._watch_others(talk)
        return self._changed

    def next_look_s(self) -> float | None:
        """Seconds until something is due; None when nothing is delayed."""
        waits = []
        if self._delays:
            waits.append(self._delays[0][0] / 1000 - self._clock.wall())
        if self._delays_changed:
            waits.append(
                self._delays_listed_at + LISTING_SHARE * self._delays_listing_s - self._clock.monotonic()
            )
        return max(min(waits), 0.0) if waits else None

    # -- what there is -------------------------------------------------------------

    def _should_list(self) -> bool:
        if not self._changed:
            return False
        if len(self._backlog) < SHORT or self._wanted_now:
            return True
        return self._clock.monotonic() - self._listed_at > LISTING_SHARE * self._listing_s

    def _list(self, talk: Talk) -> None:
        began = self._clock.monotonic()
        # Before it is asked: what changes from here on fires the watch.
        self._changed = self._wanted_now = False
        ready = talk.client.get_children_async(self.nodes.ready, watch=self.look_again)
        locks = talk.client.get_children_async(self.nodes.locks)
        try:
            names, locked = talk.wait(ready), set(talk.wait(locks))
        except NoNodeError:
            # The queue was deleted.
            self._restore(talk)
            self._changed = True
            return
        except BaseException:
            self._changed = True
            raise
        self._others = {name for name in locked if not self._hand.has_locked(self.nodes.lock(name))}
        self._others.intersection_update(names)
        self._suspects.intersection_update(names)
        self._backlog = [
            name
            for name in reversed(served_in_order(names))
            if name not in locked and not self._hand.has_locked(self.nodes.lock(name))
        ]
        self._listed_at = self._clock.monotonic()
        self._listing_s = self._listed_at - began

    def _restore(self, talk: Talk) -> None:
        for folder in self.nodes.folders:
            talk.wait(talk.client.ensure_path_async(folder))

    def _next(self, room: int) -> list[str]:
        names: list[str] = []
        while self._backlog and len(names) < room:
            if self._backlog[-1] in self._suspects and not self._hand.has_suspect:
                # Alone, so that it takes no others with it.
                return names or [self._backlog.pop()]
            name = self._backlog.pop()
            if name not in self._suspects:
                names.append(name)
        return names

    def _watch_others(self, talk: Talk) -> None:
        """Be told when one of those that hold what we passed over is gone, or gives something back."""
        missing = [
            lock for lock in (self.nodes.lock(name) for name in self._others) if lock not in self._watched
        ][: max(MOST_WATCHES - len(self._watched), 0)]
        if not missing:
            return
        self._watched.update(missing)
        asked = [talk.client.exists_async(lock, watch=self._lock_is_gone) for lock in missing]
        for lock, answer in zip(missing, asked, strict=True):
            if talk.wait(answer) is None:
                # The watch is now one for its return, which does no harm.
                self._watched.discard(lock)
                self._changed = True

    # -- taking --------------------------------------------------------------------

    def _take(self, talk: Talk, names: Sequence[str]) -> None:
        items = [self.nodes.item(name) for name in names]
        self._doubtful += names
        claimed = talk.begin([step for name in names for step in self._locking(talk, name)])
        asked = talk.read_async(items)
        refusal = talk.refused(claimed)
        read = talk.read(asked, items)
        taken = dict.fromkeys(names, True) if refusal is None else self._take_singly(talk, names, refusal)
        for name, found in zip(names, read, strict=True):
            if taken[name]:
                self._got(talk, name, found, alone=len(names) == 1)
        del self._doubtful[:]

    def _locking(self, talk: Talk, name: str) -> list[Step]:
        wanted = Wanted(self.nodes.item(name), self.nodes.lock(name))
        return [*lock_steps(wanted, talk.own), *count_steps(wanted.item)]

    def _take_singly(self, talk: Talk, names: Sequence[str], refusal: Refused) -> dict[str, bool]:
        """Somebody was faster with one of them: take the others."""
        if len(names) == 1:
            self._missed(names[0], refusal)
            return {names[0]: False}
        asked = [talk.begin(self._locking(talk, name)) for name in names]
        taken = {}
        for name, begun in zip(names, asked, strict=True):
            refused = talk.refused(begun)
            taken[name] = refused is None
            if refused is not None:
                self._missed(name, refused)
        return taken

    def _missed(self, name: str, refusal: Refused) -> None:
        if isinstance(refusal.error, NodeExistsError):
            self._others.add(name)
        elif not isinstance(refusal.error, NoNodeError):
            raise refusal.error
        elif refusal.index > 0:
            # The folder of the locks is gone: the queue was deleted.
            self._changed = True

    def _got(self, talk: Talk, name: str, found: tuple[bytes, Any] | None, alone: bool) -> None:
        if found is None:
            # A peer that knows no locks was faster.
            talk.wait(talk.client.delete_async(self.nodes.lock(name)))
            return
        data, stat = found
        count = count_of(stat)
        held = self._hand.hold(self.nodes, name, data, count.taken > 1, count.deliveries)
        keeps = not count.deliveries
        try:
            keeps = keeps or self._may_keep(talk, held, count, alone)
        finally:
            if not keeps:
                self._hand.say(Verb.REQUEUE, held.tag)
        if not keeps:
            return
        self.inbox.append(held)
        if self._closed:
            self._give_back()

    def _may_keep(self, talk: Talk, held: Held, count: Count, alone: bool) -> bool:
        """Whoever had this one was lost: it is delivered alone, or not any more."""
        held.exhausted = 0 < self._max_deliveries <= count.deliveries
        if not held.exhausted:
            self._suspects.add(held.name)
            if not alone or self._hand.has_suspect:
                return False
            self._hand.suspect(held)
        path = self.nodes.suspect(held.name)
        (known,) = talk.read(talk.read_async([path]), [path])
        if known is not None:
            held.worker, held.marked = known[0].decode("utf-8", "replace"), True
        if not held.exhausted:
            us = f"{socket.gethostname()}:{os.getpid()}".encode()
            if known is None:
                talk.wait(talk.client.ensure_path_async(self.nodes.suspects))
            write = set_data if held.marked else create
            held.marked = talk.refused(talk.begin([write(path, us)])) is None
        return True

    def _clear_doubts(self, talk: Talk) -> None:
        """We may have locked these without having heard of it."""
        names = [name for name in self._doubtful if not self._hand.has_locked(self.nodes.lock(name))]
        for name in names:
            lock = self.nodes.lock(name)
            stat = talk.wait(talk.client.exists_async(lock))
            if stat is not None and stat.ephemeralOwner == talk.session_id:
                item = self.nodes.item(name)
                (found,) = talk.read(talk.read_async([item]), [item])
                # Nobody was lost: it goes back in good order.
                kept = [] if found is None else [set_data(item, found[0])]
                if talk.refused(talk.begin([*kept, delete(lock)])) is not None:
                    talk.refused(talk.begin([delete(lock)]))
        del self._doubtful[:]
        self._changed = True

    # -- delays ----------------------------------------------------------------------

    def _move_what_is_due(self, talk: Talk) -> None:
        if self._delays_changed:
            since = self._clock.monotonic() - self._delays_listed_at
            if since >= LISTING_SHARE * self._delays_listing_s:
                self._list_delays(talk)
        now_ms = self._clock.wall() * 1000
        due = 0
        while due < min(len(self._delays), LARGEST_MOVE) and self._delays[due][0] <= now_ms:
            due += 1
        if due:
            names = [name for _, name in self._delays[:due]]
            move(talk, self.nodes, names)
            del self._delays[:due]
            self._changed = True

    def _list_delays(self, talk: Talk) -> None:
        began = self._clock.monotonic()
        self._delays_changed = False
        try:
            names = talk.wait(
                talk.client.get_children_async(self.nodes.delayed, watch=self._delays_look_again)
            )
        except NoNodeError:
            self._delays_changed = True
            self._restore(talk)
            return
        except BaseException:
            self._delays_changed = True
            raise
        self._delays = sorted(_due(names))
        self._delays_listed_at = self._clock.monotonic()
        self._delays_listing_s = self._delays_listed_at - began


def _due(names: Sequence[str]) -> list[tuple[int, str]]:
    found = []
    for name in names:
        try:
            found.append((due_ms_of(name), name))
        except (ValueError, IndexError):  # noqa: PERF203 - one bad name must not hide the others
            logger.warning("What is called %r among the delayed items is none; it is left alone.", name)
    return found


def move(talk: Talk, nodes: QueueNodes, names: Sequence[str]) -> None:
    """Make items that are due ready. Others may be doing the same: each item is moved once."""
    paths = [f"{nodes.delayed}/{name}" for name in names]
    waiting = [
        (path, found[0])
        for path, found in zip(paths, talk.read(talk.read_async(paths), paths), strict=True)
        if found is not None
    ]
    while waiting:
        batch: list[tuple[str, bytes]] = []
        size = 0
        while waiting and (not batch or size + len(waiting[0][1]) < BATCH_BYTES):
            size += len(waiting[0][1])
            batch.append(waiting.pop(0))
        if talk.refused(talk.begin(_moving(nodes, batch))) is not None:
            # Somebody was faster with one of them.
            for begun in [talk.begin(_moving(nodes, [each])) for each in batch]:
                talk.refused(begun)


def _moving(nodes: QueueNodes, batch: Sequence[tuple[str, bytes]]) -> list[Step]:
    steps = []
    for path, data in batch:
        try:
            priority = Record.unpack(data).priority
        except CorruptRecord:
            # Whoever takes it will see to it.
            priority = 0
        steps += [delete(path), create(nodes.ready_prefix(priority), data, sequence=True)]
    return steps
