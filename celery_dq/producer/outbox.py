"""The buffer of one process: what callers put in, what the flusher takes out, one lock around both.

The lock is a native one, also under gevent and eventlet: it is held for microseconds, never across anything
that waits, and the flusher is a native thread. It is re-entrant, because a destructor or a signal handler in
the middle of a put may put as well; such a message is stashed until the outer put is through.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections import deque
from dataclasses import dataclass
from typing import Any

from celery_dq.clock import Clock
from celery_dq.errors import SpillFailed
from celery_dq.native import unpatched
from celery_dq.producer.buffer import Buffer, Lane, Limits, Message
from celery_dq.producer.journal import Journal
from celery_dq.producer.unsynced import Unsynced

__all__ = ["Counters", "Outbox"]

logger = logging.getLogger(__name__)

#: A lane that was empty for so many seconds is forgotten.
IDLE_LANE_S = 60.0
#: Makes a named tuple without the detour over its own ``__new__``.
_message = tuple.__new__


@dataclass
class Counters:
    """What has happened since the process began to publish."""

    accepted: int = 0
    delivered: int = 0
    rejected: int = 0
    full: int = 0
    retries: int = 0
    replayed: int = 0
    memory_only: int = 0
    """Accepted while the disk was full: they would not have survived the process."""


class Outbox:
    """See the module.

    :param limits: of the buffer.
    :param journal: the files; None keeps messages in memory only.
    """

    def __init__(self, limits: Limits, journal: Journal | None, clock: Clock) -> None:
        self.pid = os.getpid()
        self.buffer = Buffer(limits)
        self.journal = journal
        self.clock = clock
        self.counters = Counters()
        #: Whether the disk was full, or gone, at the last put.
        self.degraded = False
        #: Nothing is accepted any more: who puts has to take another one.
        self.closed = False
        #: Whether the flusher sleeps until somebody rings.
        self.asleep = False
        self.unsynced = 0
        self.lock: Any = unpatched("_thread", "RLock")()
        self.bell: Any = unpatched("_thread", "allocate_lock")()
        self.bell.acquire()
        self._stash: deque[tuple[str, bytes, bytes]] = deque()
        self._lanes: dict[str, Lane] = {}
        #: Messages that are in memory only because the disk was full.
        self._unsafe: set[tuple[bytes, int]] = set()
        self._now = clock.monotonic

    # -- for callers

    def put(self, key: str, message_id: bytes, payload: bytes) -> bool:
        """Accept a message. False when there is no room, or it is closed; then nothing has changed."""
        lock = self.lock
        if lock._is_owned():
            self._stash.append((key, message_id, payload))
            # Whoever holds the lock may not look again; the flusher does.
            self.ring()
            return True
        with lock:
            placed = not self.closed and self._place(key, message_id, payload)
        # After the lock was let go: up to then something may have been stashed.
        if self._stash:
            self._unstash()
        if self.asleep:
            self.ring()
        return placed

    def _unstash(self) -> None:
        while self._stash:
            with self.lock:
                # It was accepted, whatever the limits say; where even that fails, the flusher tries again.
                if self._stash and self._place(*self._stash[0], force=True):
                    self._stash.popleft()
                else:
                    return

    def _place(self, key: str, message_id: bytes, payload: bytes, *, force: bool = False) -> bool:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key, uuid.uuid4().bytes)
        buffer, journal = self.buffer, self.journal
        now = self._now()
        in_memory = buffer.admits(lane, len(payload)) or (force and not lane.stored)
        if journal is None:
            if not in_memory:
                return False
            message = _message(Message, (lane.next_sequence, message_id, payload))
            lane.next_sequence += 1
        else:
            message = _message(Message, (lane.next_sequence, message_id, payload))
            # Before the write: a number that may be on disk is never given twice.
            lane.next_sequence += 1
            try:
                journal.append(lane, message, stored=not in_memory)
                self.unsynced += 1
                if self.degraded:
                    self._recovered()
            except SpillFailed as error:
                if not self.degraded:
                    self._degrade(error)
                if not in_memory:
                    return False
                self.counters.memory_only += 1
                self._unsafe.add((lane.producer, message.sequence))
        if in_memory:
            buffer.add(lane, message, now)
        else:
            buffer.add_stored(lane, message.sequence, now)
        self.counters.accepted += 1
        return True

    def _degrade(self, error: SpillFailed) -> None:
        self.degraded = True
        logger.error("The spill log cannot be written: %s. Messages are held in memory until it can.", error)

    def _recovered(self) -> None:
        self.degraded = False
        logger.warning("The spill log can be written again.")

    def ring(self) -> None:
        """Wake the flusher."""
        self.asleep = False
        with contextlib.suppress(RuntimeError):  # it rings already
            self.bell.release()

    # -- for the flusher, which is one thread

    def take(self, *, hurry: bool) -> Lane | None:
        """Put the next batch in flight, loading it first if it is on disk only."""
        buffer = self.buffer
        if self._stash:
            self._unstash()
        while buffer.stored:
            with self.lock:
                lane = buffer.wants_loading()
            if lane is None or not self._load(lane):
                break
        with self.lock:
            return buffer.take(self._now(), hurry=hurry)

    def _load(self, lane: Lane) -> bool:
        journal = self.journal
        assert journal is not None
        with self.lock:
            read = journal.next_stored(lane)
        messages = [] if read is None else read()  # the slow part, without the lock
        if lane.adopted:
            # A file that was written anew after a failed sync may repeat what an older one has.
            messages = [each for each in messages if each.sequence >= lane.next_sequence]
            if messages:
                lane.next_sequence = messages[-1].sequence + 1
            self.counters.replayed += len(messages)
        with self.lock:
            # Of an adopted lane files are counted, not messages. And damage must not leave a rest.
            settled = 1 if lane.adopted else len(messages)
            self.buffer.load(
                lane, messages, settled if journal.has_stored(lane) else lane.stored, self._now()
            )
            if not lane.waiting and not lane.in_flight:
                journal.delivered(lane, -1)
            self._forget_if_spent(lane)
        return read is not None

    def done(self, lane: Lane, *, rejected: bool = False, count: int = 1_000_000) -> list[Message]:
        """The batch in flight, or its first `count`, is over: its files may go."""
        with self.lock:
            batch = self.buffer.done_in_part(lane, count, self._now())
            if self.journal is not None and batch:
                self.journal.delivered(lane, batch[-1].sequence)
            if self._unsafe:
                self._unsafe.difference_update((lane.producer, each.sequence) for each in batch)
            if rejected:
                self.counters.rejected += len(batch)
            else:
                self.counters.delivered += len(batch)
            self._forget_if_spent(lane)
        return batch

    def _forget_if_spent(self, lane: Lane) -> None:
        if lane.adopted and not lane.busy and self.journal is not None:
            self.journal.forget(lane)

    def failed(self, lane: Lane, delay: float) -> None:
        """The batch in flight goes again after `delay` seconds."""
        with self.lock:
            self.counters.retries += 1
            self.buffer.failed(lane, self._now() + delay)

    def split(self, lane: Lane) -> bool:
        """Halve the batch in flight; False when it is a single message."""
        with self.lock:
            return self.buffer.split(lane)

    def doze(self, *, hurry: bool, recently: bool, limit: float) -> float:
        """For how many seconds the flusher may wait; after a pause it must be woken by :meth:`ring`."""
        with self.lock:
            now = self._now()
            due = self.buffer.next_due(hurry=hurry)
            if due == float("inf") and self.buffer.wants_loading() is None:
                if recently:
                    # Looking is cheaper for everybody than being woken by each message.
                    return min(limit, max(self.buffer.limits.linger_s, 0.001))
                self.asleep = True
                return limit
            return min(max(due - now, 0.0), limit)

    def tidy(self) -> None:
        """Forget lanes that are not used any more, look after the folder."""
        with self.lock:
            now, journal = self._now(), self.journal
            for key, lane in list(self._lanes.items()):
                if not lane.busy and now - lane.used_at > IDLE_LANE_S:
                    del self._lanes[key]
                    if journal is not None:
                        journal.forget(lane)
            if journal is not None and not journal.log.intact():
                logger.error("The folder %s of the spill log was taken away.", journal.log.folder)
                self._begin_anew(journal)

    def _begin_anew(self, journal: Journal) -> None:
        lanes = [*self._lanes.values()]
        for lane in lanes:
            journal.drop(lane)
        journal.forsake()
        for lane in lanes:
            # What was on disk only is gone with it, unless another process takes the folder over.
            self.buffer.load(lane, (), lane.stored, self._now())
        try:
            for lane in lanes:
                for message in (*lane.in_flight, *lane.waiting):
                    journal.append(lane, message, stored=False)
        except SpillFailed as error:
            self._degrade(error)

    def adopt(self) -> int:
        """Take over what dead processes left; returns the number of lanes."""
        journal = self.journal
        if journal is None:
            return 0
        usage = journal.log.usage()
        found = journal.look_for_orphans()
        count = 0
        with self.lock:
            journal.others_bytes = max(usage - journal.bytes, 0)
            for orphan, segments in found:
                lanes = journal.take_over(
                    orphan, segments, lambda key, producer: Lane(key, producer, adopted=True)
                )
                count += len(lanes)
                for lane in lanes:
                    for _ in range(journal.stored_files(lane)):
                        self.buffer.add_stored(lane, 0, self._now())
        return count

    def marks(self) -> list[tuple[Lane, int]]:
        """What was put so far: each lane with its last number."""
        with self.lock:
            return [(lane, lane.next_sequence - 1) for lane in self._lanes.values() if lane.busy]

    def age_s(self) -> float:
        """For how many seconds the oldest message has been here."""
        with self.lock:
            return self.buffer.oldest_s(self._now())

    def unsettled(self, marks: list[tuple[Lane, int]]) -> int:
        """How many of the messages up to the marks are neither delivered nor rejected."""
        with self.lock:
            return sum(max(last - lane.done, 0) for lane, last in marks if lane.busy)

    # -- syncing, by whoever does it

    def sync(self) -> None:
        """Have the disk write all that was put so far.

        Raises:
            SpillFailed: It could not, and writing it anew did not help.
        """
        journal = self.journal
        if journal is None:
            return
        with self.lock:
            self.unsynced = 0
            dirty = journal.dirty()
        failures = [failure for each in dirty if (failure := self._sync_one(journal, each)) is not None]
        if failures:
            raise failures[0]

    def _sync_one(self, journal: Journal, unsynced: Unsynced) -> SpillFailed | None:
        segment = unsynced.segment
        try:
            unsynced.sync()
        except OSError as error:
            logger.error("Spill log: %s could not be synced: %s.", segment.path, error)
        with self.lock:
            # The kernel tells of a failure once: it may have told who sealed the file meanwhile.
            return self._write_anew(journal, unsynced) if segment.poisoned else None

    def _write_anew(self, journal: Journal, unsynced: Unsynced) -> SpillFailed | None:
        lane = self.buffer.active.get(unsynced.producer)
        if lane is None:
            return None  # delivered meanwhile
        try:
            journal.rewrite(lane, unsynced.segment, [*lane.in_flight, *lane.waiting])
        except SpillFailed as error:
            self._degrade(error)
            return error
        return None

    # -- the end

    def close(self) -> list[tuple[Lane, Message]]:
        """Give up; returns what is neither delivered nor on disk."""
        with self.lock:
            self.closed = True
            left = self.buffer.clear()
            self._lanes.clear()
            if self.journal is not None:
                self.journal.close()
                left = [(lane, each) for lane, each in left if (lane.producer, each.sequence) in self._unsafe]
            return left

    def abandon(self) -> None:
        """This is a forked child's copy: let go of the descriptors. The lock may be held for ever."""
        if self.journal is not None:
            self.journal.abandon()
