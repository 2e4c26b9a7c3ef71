"""The buffered producer of an app: one outbox and one flusher per process, made at the first message."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from celery_dq.clock import Clock, SystemClock
from celery_dq.errors import QueueClosed, SpillFailed
from celery_dq.producer.buffer import Limits
from celery_dq.producer.errors import BufferFull, NotOnDisk
from celery_dq.producer.flusher import Flusher, Hooks
from celery_dq.producer.journal import Journal
from celery_dq.producer.outbox import Outbox
from celery_dq.producer.sender import Addressed, Sender, State
from celery_dq.producer.singular_update_queue import SingularUpdateQueue
from celery_dq.producer.spill_log import SpillLog

__all__ = ["BufferedProducer", "Persistence", "Snapshot"]

logger = logging.getLogger(__name__)

#: Seconds between two looks of a caller who waits for room or for a flush.
LOOK_S = 0.001


@dataclass(frozen=True)
class Persistence:
    """What survives what.

    :param folder: of the spill log, shared by processes; None holds messages in memory only.
    :param max_bytes: that the folder may take.
    :param sync_every: messages after which the disk must write; 1 makes every caller wait for that; 0
        leaves it to the operating system: messages survive the process, not the machine.
    :param sync_interval_s: seconds after which the disk must write; 0 is never.
    """

    folder: Path | None = None
    max_bytes: int = 1024 * 1024 * 1024
    sync_every: int = 0
    sync_interval_s: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """The state of the buffer.

    :param pending: messages that the broker has not confirmed; of folders taken over, files count until
        they are read.
    :param in_memory: of those, how many are in memory too.
    :param bytes: of memory that they take.
    :param age_s: of the oldest, in seconds.
    :param spill_bytes: of this process's files.
    :param owners: folders of the spill log: one per process, dead or alive.
    :param quarantined: files that were put aside: damaged, or refused by the broker.
    :param degraded: whether the spill log cannot be written now.
    :param last_error: why the broker did not take the last batch; "" when it did.
    :param counters: what happened since the process began to publish.
    """

    pending: int
    in_memory: int
    bytes: int
    age_s: float
    spill_bytes: int
    owners: tuple[str, ...]
    quarantined: tuple[Path, ...]
    degraded: bool
    last_error: str
    counters: dict[str, int]


class _Own:
    """What belongs to one process."""

    def __init__(self, limits: Limits, kept: Persistence, sender: Sender, hooks: Hooks, clock: Clock) -> None:
        journal = None
        if kept.folder is not None:
            syncs = bool(kept.sync_every or kept.sync_interval_s)
            journal = Journal(SpillLog(kept.folder), kept.max_bytes, sync_on_seal=syncs)
        self.pid = os.getpid()
        self.outbox = Outbox(limits, journal, clock)
        self.flusher = Flusher(self.outbox, sender, hooks)
        self.interval_s = kept.sync_interval_s
        self.syncer: SingularUpdateQueue[bool, None] = SingularUpdateQueue.grouped(
            self._sync, max_batch=100_000, capacity=100_000, name="celery-dq-sync"
        )
        self.sync_asked = False

    def _sync(self, urgent: Any) -> list[None]:
        """Group commit: one sync for all that ask. Nobody in a hurry: let the interval pass first."""
        if not any(urgent):
            deadline = time.monotonic() + self.interval_s
            while (left := deadline - time.monotonic()) > 0 and not len(self.syncer):
                time.sleep(min(left, 0.005))
        self.sync_asked = False
        self.outbox.sync()
        return [None] * len(urgent)


class BufferedProducer:
    """Accepts messages in microseconds and sends them from a thread.

    Safe between threads, greenlets and coroutines, and after a fork, where the child begins anew. Nothing
    starts before the first message.

    :param sender: makes the sender of a process; its `send` is called by the flusher only.
    :param max_block_s: seconds that :meth:`put` waits for room; in a running event loop it never does.
    :param close_timeout_s: seconds for the last messages at interpreter exit.
    """

    def __init__(
        self,
        sender: Callable[[], Sender],
        *,
        limits: Limits | None = None,
        persistence: Persistence | None = None,
        max_block_s: float = 1.0,
        close_timeout_s: float = 2.0,
        clock: Clock | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.persistence = persistence or Persistence()
        self.hooks = Hooks()
        self._syncs = bool(self.persistence.sync_every or self.persistence.sync_interval_s)
        self._sender = sender
        self._max_block_s = max_block_s
        self._close_timeout_s = close_timeout_s
        self._clock: Clock = clock or SystemClock()
        self._own: _Own | None = None
        self._starting = threading.RLock()
        self._pid = os.getpid()

    # -- putting

    def put(self, message: Addressed) -> None:
        """Accept a message; see :class:`Persistence` for what it survives from then on.

        Raises:
            BufferFull: No room within `max_block_s`.
            NotOnDisk: With ``sync_every=1``: the disk did not take it.
        """
        own = self._own
        if own is None or own.pid != os.getpid():
            own = self._begin()
        while not own.outbox.put(*message) and not self._wait_for_room(own.outbox, message):
            # It was closed meanwhile.
            own = self._begin()
        if self._syncs:
            self._persist(own, self.persistence)

    def _wait_for_room(self, outbox: Outbox, message: Addressed) -> bool:
        """Put it as soon as there is room; False when the outbox was closed."""
        deadline = time.monotonic() + (0.0 if in_event_loop() else self._max_block_s)
        while True:
            outbox.ring()
            if outbox.closed:
                return False
            if time.monotonic() >= deadline:
                outbox.counters.full += 1
                where = "memory" if outbox.journal is None else "memory and spill log"
                raise BufferFull(
                    f"{where} of the buffer are full ({outbox.buffer.pending} messages): the broker is "
                    "slower than its producers, or down; see dq_buffer_max_messages and "
                    "dq_buffer_max_spill_bytes"
                )
            time.sleep(LOOK_S)
            if outbox.put(*message):
                return True

    def _persist(self, own: _Own, kept: Persistence) -> None:
        if kept.folder is None:
            return
        try:
            if kept.sync_every == 1:
                own.syncer.submit(True).result()
            elif kept.sync_every and own.outbox.unsynced >= kept.sync_every:
                own.outbox.unsynced = 0
                own.syncer.submit(True, block=False)
            elif kept.sync_interval_s and not own.sync_asked:
                own.sync_asked = True
                own.syncer.submit(False, block=False)
        except (SpillFailed, QueueClosed) as error:
            raise NotOnDisk(f"the message is buffered and may be sent, but not on disk: {error}") from error

    def _begin(self) -> _Own:
        if self._pid != os.getpid():
            # The lock may be held by a thread that does not exist here.
            self._starting = threading.RLock()
            self._pid = os.getpid()
        with self._starting:
            old = self._own
            if old is not None:
                if old.pid == os.getpid():
                    return old
                old.outbox.abandon()
            own = _Own(self.limits, self.persistence, self._sender(), self.hooks, self._clock)
            if self._own is not None and self._own.pid == own.pid:
                return self._own  # a destructor that ran meanwhile has put as well, and was here first
            self._own = own
            try:
                own.flusher.start()
            except RuntimeError as error:  # the interpreter ends: what is on disk is sent by somebody else
                logger.warning("The flusher cannot start: %s.", error)
            _call_at_exit(self)
            return own

    def start(self) -> None:
        """Begin without a message: takes over what dead processes left, and sends it."""
        if self._own is None or self._own.pid != os.getpid():
            self._begin()

    # -- waiting

    def _mine(self) -> _Own | None:
        own = self._own
        return own if own is not None and own.pid == os.getpid() else None

    def hurry(self) -> None:
        """Send at once what is there, and do not wait for it."""
        own = self._mine()
        if own is not None and own.outbox.buffer.pending:
            own.flusher.hurry()

    def flush(self, timeout: float | None = None) -> int:
        """Send what was put so far and wait until the broker has it.

        :param timeout: seconds; default as long as it takes.

        Returns:
            How many of them the broker has not confirmed; 0 when all is well.
        """
        own = self._mine()
        if own is None:
            return 0
        marks = own.outbox.marks()
        deadline = None if timeout is None else time.monotonic() + timeout
        own.flusher.hurry()
        while (left := own.outbox.unsettled(marks)) and (deadline is None or time.monotonic() < deadline):
            time.sleep(LOOK_S)
        return left

    async def aflush(self, timeout: float | None = None) -> int:
        """:meth:`flush` for asyncio."""
        own = self._mine()
        if own is None:
            return 0
        marks = own.outbox.marks()
        deadline = None if timeout is None else time.monotonic() + timeout
        own.flusher.hurry()
        while (left := own.outbox.unsettled(marks)) and (deadline is None or time.monotonic() < deadline):
            await asyncio.sleep(LOOK_S)
        return left

    def close(self, timeout: float | None = None) -> int:
        """Flush, end the thread, release the files. The next message begins anew.

        :param timeout: seconds for all of it; default ``dq_buffer_close_timeout``.

        Returns:
            How many messages the broker has not confirmed. Those on disk are sent by the next process that
            uses the folder; ``on_error`` is told about the others.
        """
        own = self._mine()
        if own is None:
            return 0
        deadline = time.monotonic() + (self._close_timeout_s if timeout is None else timeout)
        self.flush(max(deadline - time.monotonic(), 0.0))
        ended = own.flusher.stop(max(deadline - time.monotonic(), 0.05))
        if self._own is own:
            self._own = None
        pending = own.outbox.buffer.pending
        own.syncer.close(max(deadline - time.monotonic(), 0.05))
        if not ended:
            # Its thread is in a call to the broker: the files stay locked until the process ends.
            logger.warning("The flusher did not end in time, %d messages are left.", pending)
            return pending
        for lane, message in own.outbox.close():
            state: State = "possibly_sent" if lane.failures and message in lane.in_flight else "not_sent"
            self.hooks.failed(BufferFull("the buffer was closed"), lane, message, state)
        return pending

    # -- looking

    def snapshot(self) -> Snapshot:
        """The state of this process's buffer and of the shared folder."""
        own = self._mine()
        folder = self.persistence.folder
        log = None if folder is None else SpillLog(folder)
        outbox = None if own is None else own.outbox
        buffer = None if outbox is None else outbox.buffer
        journal = None if outbox is None else outbox.journal
        return Snapshot(
            pending=0 if buffer is None else buffer.pending,
            in_memory=0 if buffer is None else buffer.messages,
            bytes=0 if buffer is None else buffer.bytes,
            age_s=0.0 if buffer is None or outbox is None else outbox.age_s(),
            spill_bytes=0 if journal is None else journal.bytes,
            owners=() if log is None else tuple(log.owners()),
            quarantined=() if log is None else tuple(log.quarantined_files()),
            degraded=outbox is not None and outbox.degraded,
            last_error="" if own is None else own.flusher.last_error,
            counters={} if outbox is None else asdict(outbox.counters),
        )


def in_event_loop() -> bool:
    """Whether an asyncio event loop runs in this thread: it must not be held up."""
    return "asyncio" in sys.modules and asyncio._get_running_loop() is not None


def _call_at_exit(producer: BufferedProducer) -> None:
    reference, pid = weakref.ref(producer), os.getpid()

    def close() -> None:
        found = reference()
        if found is not None and pid == os.getpid():
            found.close()

    atexit.register(close)
    # A child of multiprocessing (or billiard) ends without atexit.
    for name in ("multiprocessing.util", "billiard.util"):
        module = sys.modules.get(name)
        if module is not None:
            module.Finalize(None, close, exitpriority=10)
