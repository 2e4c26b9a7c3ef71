"""The message store of one process. Callers put messages in, and the flusher takes them out, under one lock.

The lock is a native one, also under gevent and eventlet, because the flusher is a native thread. It is held
for microseconds and never while a thread waits. It is re-entrant, because a destructor or a signal handler
that runs during a put may put a message too. Such a message is stashed until the outer put is done.
"""

from __future__ import annotations

import contextlib
import uuid
from collections import deque
from dataclasses import dataclass
from typing import Any

from celery_dq.clock import Clock
from celery_dq.errors import SpillFailed
from celery_dq.native import unpatched
from celery_dq.producer.buffer import BufferedMessage, Lane, Limits, MessageBuffer
from celery_dq.producer.segment_index import SegmentIndex
from celery_dq.producer.sender import State
from celery_dq.producer.spill_log import PendingSync
from celery_dq.shown import shown_logger

__all__ = ["Counters", "MessageStore"]

logger = shown_logger(__name__)

#: Seconds after which an empty lane is forgotten.
IDLE_LANE_S = 60.0
#: Makes a named tuple without the cost of its own ``__new__``.
_message = tuple.__new__


@dataclass
class Counters:
    """Counts since the process began to publish.

    Attributes:
        accepted: Messages that :meth:`MessageStore.put` accepted.
        delivered: Messages that the broker has confirmed.
        rejected: Messages that the broker refused.
        full: Calls that failed because there was no room.
        retries: Batches that were sent again.
        replayed: Messages that were adopted from dead processes.
        memory_only: Messages accepted while the disk was full, which the end of the process would have lost.
        unreadable: Messages that could not be read from a damaged or missing file. A part of another
            process's file whose number of messages is not known counts as one.
    """

    accepted: int = 0
    delivered: int = 0
    rejected: int = 0
    full: int = 0
    retries: int = 0
    replayed: int = 0
    memory_only: int = 0
    unreadable: int = 0


class MessageStore:
    """The message store; see the module.

    Args:
        limits: Limits of the buffer.
        index: The segment index; None keeps messages in memory only.
        clock: Its monotonic time orders linger and retries.

    Attributes:
        degraded: Whether the last write to the spill log failed.
        closed: Whether the store accepts nothing any more, so that a caller has to use a new one.
        asleep: Whether the flusher waits for a wake-up by :meth:`wake`.
        synced: Value of ``counters.accepted`` up to which all messages are on disk, or delivered.
        found: Folders of dead processes that the last search found.
    """

    def __init__(self, limits: Limits, index: SegmentIndex | None, clock: Clock) -> None:
        self.buffer = MessageBuffer(limits)
        self.segment_index = index
        self.clock = clock
        self.counters = Counters()
        self.degraded = False
        self.closed = False
        self.asleep = False
        self.synced = 0
        self.found = 0
        self.lock: Any = unpatched("_thread", "RLock")()
        self.wakeup: Any = unpatched("_thread", "allocate_lock")()
        self.wakeup.acquire()
        self._stash: deque[tuple[str, bytes, bytes]] = deque()
        self._lanes: dict[str, Lane] = {}
        #: Messages that are in memory only because the disk was full.
        self._unsafe: set[tuple[bytes, int]] = set()
        self._now = clock.monotonic

    # -- for callers

    def put(self, key: str, message_id: bytes, payload: bytes) -> bool:
        """Accept a message.

        Args:
            key: Name of the destination.
            message_id: The task id.
            payload: The packed message.

        Returns:
            False when there is no room or the store is closed; nothing has changed then.
        """
        lock = self.lock
        if lock._is_owned():
            self._stash.append((key, message_id, payload))
            # The outer put may have passed its check of the stash already. The flusher checks it too.
            self.wake()
            return True
        with lock:
            placed = not self.closed and self._place(key, message_id, payload)
        # After the release of the lock, because a nested put can stash a message until then.
        if self._stash:
            self._unstash()
        if self.asleep:
            self.wake()
        return placed

    def _unstash(self) -> None:
        while self._stash:
            with self.lock:
                # The message was accepted, so the limits do not apply. After a failure the flusher tries
                # again.
                if self._stash and self._place(*self._stash[0], force=True):
                    self._stash.popleft()
                else:
                    return

    def _place(self, key: str, message_id: bytes, payload: bytes, *, force: bool = False) -> bool:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key, uuid.uuid4().bytes)
        buffer, index = self.buffer, self.segment_index
        now = self._now()
        in_memory = buffer.admits(lane, len(payload)) or (force and not lane.stored)
        if index is None:
            if not in_memory:
                return False
            message = _message(BufferedMessage, (lane.next_sequence, message_id, payload))
            lane.next_sequence += 1
        else:
            message = _message(BufferedMessage, (lane.next_sequence, message_id, payload))
            # Before the write, so that a number that may be on disk is never used twice.
            lane.next_sequence += 1
            try:
                index.append(lane, message, stored=not in_memory)
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
            if len(lane.waiting) == buffer.limits.batch_size:
                self.wake()  # a full batch does not linger
        else:
            buffer.add_stored(lane, message.sequence, now)
        self.counters.accepted += 1
        return True

    def _degrade(self, error: SpillFailed) -> None:
        self.degraded = True
        logger.error(
            "The spill log cannot be written: %s. New messages are held in memory until it can.",
            error,
            extra={"event": "spill_unwritable"},
        )

    def _recovered(self) -> None:
        self.degraded = False
        logger.warning("The spill log can be written again.", extra={"event": "spill_writable"})

    def wake(self) -> None:
        """Wake the flusher."""
        self.asleep = False
        with contextlib.suppress(RuntimeError):  # the wake-up was sent already
            self.wakeup.release()

    # -- for the flusher thread

    def take(self) -> Lane | None:
        """Put the next batch in flight, after loading it if it is on disk only.

        Returns:
            The lane of the batch; None when none is due.
        """
        buffer = self.buffer
        if self._stash:
            self._unstash()
        while buffer.stored:
            with self.lock:
                lane = buffer.wants_loading()
            if lane is None or not self._load(lane):
                break
        with self.lock:
            # A message that was returned by `left` is not sent any more.
            return None if self.closed else buffer.take(self._now())

    def _load(self, lane: Lane) -> bool:
        index = self.segment_index
        assert index is not None
        with self.lock:
            read = index.next_stored(lane)
        messages = [] if read is None else read()  # slow, so without the lock
        self.counters.unreadable = index.log.unreadable
        if lane.adopted:
            # A file that was rewritten after a failed sync may repeat messages of an older file.
            messages = [each for each in messages if each.sequence >= lane.next_sequence]
            if messages:
                lane.next_sequence = messages[-1].sequence + 1
            self.counters.replayed += len(messages)
        with self.lock:
            # An adopted lane counts files, not messages. After the last file the count drops to zero, so that
            # lost messages of a damaged file are not counted for ever.
            settled = 1 if lane.adopted else len(messages)
            self.buffer.load(lane, messages, settled if index.has_stored(lane) else lane.stored, self._now())
            if not lane.waiting and not lane.in_flight:
                index.delivered(lane, -1)
            self._forget_if_spent(lane)
        return read is not None

    def done(self, lane: Lane, *, rejected: bool = False, count: int = 1_000_000) -> list[BufferedMessage]:
        """Settle the batch in flight, or its first `count` messages, and remove files without other messages.

        Args:
            lane: The lane of the batch.
            rejected: Whether the broker refused the messages; else it has them.
            count: How many messages of the batch are settled.

        Returns:
            The settled messages.
        """
        with self.lock:
            batch = self.buffer.done_in_part(lane, count, self._now())
            if self.segment_index is not None and batch:
                self.segment_index.delivered(lane, batch[-1].sequence)
            if self._unsafe:
                self._unsafe.difference_update((lane.producer, each.sequence) for each in batch)
            if rejected:
                self.counters.rejected += len(batch)
            else:
                self.counters.delivered += len(batch)
            self._forget_if_spent(lane)
        return batch

    def _forget_if_spent(self, lane: Lane) -> None:
        if lane.adopted and not lane.busy and self.segment_index is not None:
            self.segment_index.forget(lane)

    def failed(self, lane: Lane, delay: float, took_s: float = 0.0) -> None:
        """Send the batch in flight again after `delay` seconds.

        Args:
            lane: The lane of the batch.
            delay: Seconds until then.
            took_s: Seconds that the attempt took. Lanes that fail use half of the thread's time at most.
        """
        with self.lock:
            self.counters.retries += 1
            now = self._now()
            self.buffer.failed(lane, now + delay, now + took_s)

    def split(self, lane: Lane) -> bool:
        """Halve the batch in flight. Return False when it is a single message."""
        with self.lock:
            return self.buffer.split(lane)

    def reject(self, lane: Lane, message: BufferedMessage, error: Exception) -> object:
        """Keep a message that the broker refuses with an error; return the file, None without a spill log.

        Raises:
            OSError: The file cannot be written.
        """
        return None if self.segment_index is None else self.segment_index.reject(lane, message)

    def sleep_until_due(self, *, recently: bool, limit: float) -> float:
        """Return for how many seconds the flusher may wait for :meth:`wake`.

        Args:
            recently: Whether messages came recently, so that the flusher polls.
            limit: Longest wait in seconds.
        """
        with self.lock:
            now = self._now()
            due, linger_s = self.buffer.next_due(), self.buffer.limits.linger_s
            is_idle = due == float("inf") and self.buffer.wants_loading() is None
            if is_idle and recently:
                # Polling costs callers and flusher less than one wake-up per message.
                return min(limit, max(linger_s, 0.001))
            wait = min(max(due - now, 0.0), limit)
            # While a lane waits longer than messages linger, a message for another one must wake the flusher.
            self.asleep = is_idle or wait > linger_s
            return wait

    def tidy(self) -> None:
        """Forget idle lanes, and use a new folder if the present one was removed."""
        with self.lock:
            now, index = self._now(), self.segment_index
            for key, lane in list(self._lanes.items()):
                if not lane.busy and now - lane.used_at > IDLE_LANE_S:
                    del self._lanes[key]
                    if index is not None:
                        index.forget(lane)
            if index is not None and not index.log.intact():
                logger.error(
                    "Spill log folder %s was removed, with %d messages that were on disk only. The messages "
                    "in memory are written to a new folder.",
                    index.log.folder,
                    sum(lane.stored for lane in self._lanes.values()),
                    extra={"event": "spill_folder_removed"},
                )
                self._start_new_segment(index)

    def _start_new_segment(self, index: SegmentIndex) -> None:
        lanes = [*self._lanes.values()]
        held = [(lane, message) for lane in lanes for message in (*lane.in_flight, *lane.waiting)]
        self._unsafe = {(lane.producer, message.sequence) for lane, message in held}
        for lane in lanes:
            index.drop(lane)
        index.forsake()
        for lane in lanes:
            # Messages on disk only are lost with the folder, unless another process adopts it.
            index.log.unreadable += lane.stored
            self.buffer.load(lane, (), lane.stored, self._now())
        try:
            for lane, message in held:
                index.append(lane, message, stored=False)
                self._unsafe.discard((lane.producer, message.sequence))
        except SpillFailed as error:
            self._degrade(error)

    def adopt(self) -> int:
        """Adopt the messages of dead processes. Return the number of adopted lanes."""
        index = self.segment_index
        if index is None:
            return 0
        usage = index.log.usage()
        found = index.look_for_orphans()
        self.counters.unreadable = index.log.unreadable
        count = 0
        with self.lock:
            self.found = len(found)
            index.others_bytes = max(usage - index.bytes, 0)
            for orphan, segments in found:
                lanes = index.take_over(
                    orphan, segments, lambda key, producer: Lane(key, producer, adopted=True)
                )
                count += len(lanes)
                for lane in lanes:
                    for _ in range(index.stored_files(lane)):
                        self.buffer.add_stored(lane, 0, self._now())
        return count

    def marks(self) -> list[tuple[Lane, int]]:
        """Return each lane that holds messages, with the sequence of its last message so far."""
        with self.lock:
            return [(lane, lane.next_sequence - 1) for lane in self._lanes.values() if lane.busy]

    def adopted_pending(self) -> int:
        """Return how many adopted messages, and adopted files that are not read yet, are left."""
        with self.lock:
            return sum(lane.pending for lane in self.buffer.active.values() if lane.adopted)

    def age_s(self) -> float:
        """Return the age of the oldest message in seconds."""
        with self.lock:
            return self.buffer.oldest_s(self._now())

    def unsettled(self, marks: list[tuple[Lane, int]]) -> int:
        """Return how many messages up to the marks are neither delivered nor rejected."""
        with self.lock:
            return sum(max(last - lane.done, 0) for lane, last in marks if lane.busy)

    # -- syncing, from any thread

    def sync(self) -> None:
        """Write all messages so far to disk.

        Raises:
            SpillFailed: A file could not be synced, and its messages could not be written to a new file. Or
                messages are in memory only, because the disk was full.
        """
        index = self.segment_index
        if index is None:
            return
        with self.lock:
            accepted, unsafe = self.counters.accepted, len(self._unsafe)
            dirty = index.dirty()
        failures = [failure for each in dirty if (failure := self._sync_one(index, each)) is not None]
        if failures:
            raise failures[0]
        if unsafe:
            raise SpillFailed(f"{index.log.root} could not be written: {unsafe} messages are in memory only")
        self.synced = accepted

    def _sync_one(self, index: SegmentIndex, unsynced: PendingSync) -> SpillFailed | None:
        segment = unsynced.segment
        try:
            unsynced.sync()
        except OSError as error:
            logger.error(
                "Spill log file %s could not be synced: %s. Its messages are written to a new file.",
                segment.path,
                error,
                extra={"event": "spill_sync_failed"},
            )
        with self.lock:
            # The kernel reports a failure once. The thread that sealed the file may have received it.
            return self._rewrite(index, unsynced) if segment.poisoned else None

    def _rewrite(self, index: SegmentIndex, unsynced: PendingSync) -> SpillFailed | None:
        lane = self.buffer.active.get(unsynced.segment.header.producer)
        if lane is None:
            return None  # all messages were delivered meanwhile
        try:
            index.rewrite(lane, unsynced.segment, [*lane.in_flight, *lane.waiting])
        except SpillFailed as error:
            self._degrade(error)
            return error
        return None

    # -- the end

    def refuse(self) -> bool:
        """Accept no message from now on, and begin no batch. Return False if that was so before."""
        with self.lock:
            if self.closed:
                return False
            self.closed = True
            self._unstash()
            return True

    def left(self) -> list[tuple[Lane, BufferedMessage, State]]:
        """Return the messages that are neither delivered nor on disk, each with its state."""
        with self.lock:
            states: tuple[State, State] = ("possibly_sent", "not_sent")
            return [
                (lane, message, state)
                for lane in self.buffer.active.values()
                for state, messages in zip(states, (lane.in_flight, lane.waiting), strict=True)
                for message in messages
                if self.segment_index is None or (lane.producer, message.sequence) in self._unsafe
            ]

    def close(self) -> None:
        """Close the files. Those with messages stay for the process that adopts them. Idempotent."""
        index = self.segment_index
        if index is None:
            return
        if index.sync_on_seal:
            with contextlib.suppress(SpillFailed):  # it was logged, or `left` returns the messages in memory
                self.sync()
        with self.lock:
            index.close()

    def abandon(self) -> None:
        """Close the descriptors that a forked child inherited. The lock may be held, and is not taken."""
        if self.segment_index is not None:
            self.segment_index.abandon()
