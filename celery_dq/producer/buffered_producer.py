"""The buffered producer of an app, with one message store and one flusher per process."""

from __future__ import annotations

import asyncio
import atexit
import errno
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from celery_dq.clock import Clock, SystemClock
from celery_dq.errors import ConfigurationError, QueueClosed, SpillFailed
from celery_dq.per_process import OwnerProcess, PerProcess, current_pid
from celery_dq.producer.buffer import Limits
from celery_dq.producer.flusher import DeliveryCallbacks, Flusher
from celery_dq.producer.message_store import MessageStore
from celery_dq.producer.segment_index import SegmentIndex
from celery_dq.producer.sender import Addressed, BufferFull, NotOnDisk, Sender
from celery_dq.producer.singular_update_queue import SingularUpdateQueue
from celery_dq.producer.spill_log import SpillLog
from celery_dq.shown import shown_logger

__all__ = ["BufferedProducer", "Persistence", "ProducerSnapshot"]

logger = shown_logger(__name__)

#: Seconds between two checks of a call that waits for room or for a flush.
LOOK_S = 0.001


@dataclass(frozen=True)
class Persistence:
    """The failures that buffered messages survive.

    Attributes:
        folder: Folder of the spill log, shared by processes; None holds messages in memory only.
        max_bytes: Limit of the folder in bytes.
        sync_every: Number of accepted messages that are not on disk, which is not reached: the call waits for
            a sync. With 1 each call waits. With 0 the operating system decides: messages survive the process,
            but not the machine.
        sync_interval_s: Seconds after which the disk is synced; 0 never syncs by time.
    """

    folder: Path | None = None
    max_bytes: int = 1024 * 1024 * 1024
    sync_every: int = 0
    sync_interval_s: float = 0.0


@dataclass(frozen=True)
class ProducerSnapshot:
    """The state of the buffer.

    Attributes:
        pending: Messages that the broker has not confirmed. An adopted file counts as one until it is read.
        in_memory: How many of the pending messages are in memory.
        bytes: Memory in bytes that those messages take.
        age_s: Age of the oldest pending message in seconds.
        spill_bytes: Bytes of this process's files.
        owners: Folders of the spill log, one per process, dead or alive.
        quarantined: Files in the quarantine: damaged files and refused messages.
        degraded: Whether the last write to the spill log failed.
        last_error: Error of the last failed batch; "" after a delivered one.
        counters: Counts since the process began to publish, see
            :class:`celery_dq.producer.message_store.Counters`.
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


class _ProducerProcess:
    """The message store, the flusher and the sync queue of one process."""

    def __init__(
        self, limits: Limits, kept: Persistence, sender: Sender, hooks: DeliveryCallbacks, clock: Clock
    ) -> None:
        index = None
        if kept.folder is not None:
            syncs = bool(kept.sync_every or kept.sync_interval_s)
            index = SegmentIndex(SpillLog(kept.folder), kept.max_bytes, sync_on_seal=syncs)
        self.owner = OwnerProcess()
        self.message_store = MessageStore(limits, index, clock)
        self.flusher = Flusher(self.message_store, sender, hooks)
        self.interval_s = kept.sync_interval_s
        self.syncer: SingularUpdateQueue[bool, None] = SingularUpdateQueue.grouped(
            self._sync, max_batch=100_000, capacity=100_000, name="celery-dq-sync"
        )
        #: The request that waits for a sync: 0 is none, 1 waits for the interval, 2 is urgent.
        self.sync_asked = 0
        #: Whether a flush waits for the files of dead processes as well.
        self.replays = False

    def _sync(self, urgent: Any) -> list[None]:
        """Do one sync for all requests in the queue; without an urgent one, wait for the interval first."""
        if not any(urgent):
            deadline = time.monotonic() + self.interval_s
            while (left := deadline - time.monotonic()) > 0 and not (len(self.syncer) or self.syncer.closed):
                time.sleep(min(left, 0.005))
        self.sync_asked = 0
        self.message_store.sync()
        return [None] * len(urgent)


class _Flush:
    """One wait for all messages that were put before it and, after a replay, for all adopted messages.

    Args:
        own: The state of this process.
        timeout: Seconds; None waits without a limit.

    Attributes:
        left: How many of the messages, or unread adopted files, were not confirmed at the last check.
    """

    def __init__(self, own: _ProducerProcess, timeout: float | None) -> None:
        self.left = 0
        self._own = own
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._marks = own.message_store.marks()
        #: Number of the search for folders of dead processes to wait for; 0 waits for none.
        self._look = own.flusher.look_for_orphans() if own.replays else 0
        self._look_again = False
        own.flusher.flush_soon()

    def waits(self) -> bool:
        """Check the messages, and return whether to check again a little later."""
        runs = self._own.flusher.runs  # before the check, because its last batch counts
        self.left = self._unconfirmed()
        is_late = self._deadline is not None and time.monotonic() >= self._deadline
        return bool(self.left) and runs and not is_late

    def _unconfirmed(self) -> int:
        message_store, flusher = self._own.message_store, self._own.flusher
        left = message_store.unsettled(self._marks)
        if not self._look:
            return left
        if flusher.looked < self._look:
            return left + 1
        if adopted := message_store.adopted_pending():
            self._look_again = True
            return left + adopted
        if self._look_again or message_store.found:
            # A search skips a folder while another folder of the same lane is not done. So search again.
            self._look, self._look_again = flusher.look_for_orphans(), False
            return left + 1
        return left


class BufferedProducer:
    """Accepts messages in microseconds and sends them from a thread.

    Safe between threads, greenlets and coroutines, and after a fork, where the child begins with an empty
    buffer. The thread starts with the first message.

    Args:
        sender: Makes the sender of a process, whose `send` is called by the flusher only.
        limits: Limits of the buffer; default :class:`~celery_dq.producer.buffer.Limits` without arguments.
        persistence: The spill log; default in memory only.
        max_block_s: Seconds that :meth:`put` waits for room. In a running event loop it never waits.
        close_timeout_s: Seconds for the last messages at interpreter exit.
        clock: Default the clocks of this machine.
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
        self.hooks = DeliveryCallbacks()
        self._syncs = bool(self.persistence.sync_every or self.persistence.sync_interval_s)
        self._sender = sender
        self._max_block_s = max_block_s
        self._close_timeout_s = close_timeout_s
        self._clock: Clock = clock or SystemClock()
        self._own: _ProducerProcess | None = None
        self._starting = PerProcess(threading.RLock)
        #: Registered at the first message of a process.
        self._exit_handlers = PerProcess(partial(_call_at_exit, self))

    # -- putting

    def put(self, message: Addressed) -> None:
        """Accept a message. :class:`Persistence` says which failures it survives after that.

        Raises:
            BufferFull: There was no room within `max_block_s`.
            ConfigurationError: The folder cannot be used, at the first message.
            NotOnDisk: As many messages as ``sync_every`` are not on disk, and could not be written to it.
        """
        own = self._own
        if own is None or own.owner.pid != current_pid():
            own = self._begin()
        while not own.message_store.put(*message) and not self._wait_for_room(own.message_store, message):
            # The store was closed meanwhile.
            own = self._begin()
        if self._syncs:
            self._persist(own, self.persistence)

    async def aput(self, message: Addressed) -> None:
        """Do the same as :meth:`put`, in asyncio. A thread waits for the disk."""
        own = self._mine() or self._begin()
        while not own.message_store.put(*message):
            for _ in self._looks_for_room(own.message_store, self._max_block_s):
                await asyncio.sleep(LOOK_S)
                if own.message_store.put(*message):
                    break
            else:
                own = self._begin()  # the store was closed meanwhile
                continue
            break
        if self._syncs:
            await asyncio.to_thread(self._persist, own, self.persistence)

    def _wait_for_room(self, message_store: MessageStore, message: Addressed) -> bool:
        """Put a message as soon as there is room. Return False when the message store was closed."""
        for _ in self._looks_for_room(message_store, 0.0 if in_event_loop() else self._max_block_s):
            time.sleep(LOOK_S)
            if message_store.put(*message):
                return True
        return False

    def _looks_for_room(self, message_store: MessageStore, max_block_s: float) -> Iterator[None]:
        """Yield before each look for room; return when the message store was closed."""
        deadline = time.monotonic() + max_block_s
        while True:
            message_store.wake()
            if message_store.closed:
                return
            if time.monotonic() >= deadline:
                message_store.counters.full += 1
                full = "memory is" if message_store.segment_index is None else "memory and spill log are"
                raise BufferFull(
                    f"the buffer's {full} full ({message_store.buffer.pending} messages), because the broker "
                    "is slower than its producers, or down: restore the broker, or raise "
                    "dq_buffer_max_messages and dq_buffer_max_spill_bytes"
                )
            yield

    def _persist(self, own: _ProducerProcess, kept: Persistence) -> None:
        if kept.folder is None:
            return
        unsynced = own.message_store.counters.accepted - own.message_store.synced
        half_full = bool(kept.sync_every) and unsynced * 2 >= kept.sync_every
        urgency = 2 if half_full else 1 if kept.sync_interval_s else 0
        try:
            if half_full and unsynced >= kept.sync_every:
                own.syncer.submit(True).result()
            elif urgency > own.sync_asked:
                own.sync_asked = urgency
                with suppress(QueueClosed):  # the close of the message store syncs its files
                    own.syncer.submit(half_full, block=False)
        except (SpillFailed, QueueClosed) as error:
            raise NotOnDisk(
                f"the message is buffered and may be sent, but dq_buffer_sync_every = {kept.sync_every} "
                f"messages are not on disk: {error}"
            ) from error

    def _begin(self) -> _ProducerProcess:
        with self._starting.get():
            old = self._own
            if old is not None:
                if old.owner.is_current:
                    return old
                old.message_store.abandon()
            if self.persistence.folder is not None:
                _refuse_unusable(self.persistence.folder)
            own = _ProducerProcess(self.limits, self.persistence, self._sender(), self.hooks, self._clock)
            made = self._mine()
            if made is not None:
                return made  # a destructor that ran meanwhile has put a message, and made it
            self._own = own
            try:
                own.flusher.start()
            except RuntimeError as error:  # the interpreter ends
                logger.warning(
                    "The flusher thread cannot start (%s); messages on disk are sent by a later process.",
                    error,
                    extra={"event": "buffer_flusher_not_started"},
                )
            self._exit_handlers.get()
            return own

    def start(self) -> None:
        """Start the thread without a message. It adopts and sends the messages of dead processes.

        Each later :meth:`flush` of this process waits for the adopted messages too.

        Raises:
            ConfigurationError: The folder cannot be used.
        """
        own = self._mine() or self._begin()
        own.replays = own.message_store.segment_index is not None

    # -- waiting

    def _mine(self) -> _ProducerProcess | None:
        own = self._own
        return own if own is not None and own.owner.is_current else None

    def flush_soon(self) -> None:
        """Send all messages in the buffer without linger. Does not wait."""
        own = self._mine()
        if own is not None and own.message_store.buffer.pending:
            own.flusher.flush_soon()

    def flush(self, timeout: float | None = None) -> int:
        """Send all messages that were put so far, and wait until the broker has them.

        After :meth:`start` this includes the messages of dead processes. A :meth:`close` by another thread
        ends the wait.

        Args:
            timeout: Seconds; None waits without a limit.

        Returns:
            How many of the messages the broker has not confirmed. An adopted file counts as one until it is
            read.
        """
        own = self._mine()
        if own is None:
            return 0
        flush = _Flush(own, timeout)
        while flush.waits():
            time.sleep(LOOK_S)
        return flush.left

    async def aflush(self, timeout: float | None = None) -> int:
        """Do the same as :meth:`flush`, in asyncio."""
        own = self._mine()
        if own is None:
            return 0
        flush = _Flush(own, timeout)
        while flush.waits():
            await asyncio.sleep(LOOK_S)
        return flush.left

    def close(self, timeout: float | None = None) -> int:
        """Flush, end the thread, and unlock the files. The next message starts a new thread.

        Args:
            timeout: Seconds for all steps together; default ``dq_buffer_close_timeout``.

        Returns:
            How many messages the broker has not confirmed. Messages on disk are sent by the next process that
            uses the folder. The other ones are reported to ``on_error``.
        """
        own = self._mine()
        if own is None:
            return 0
        deadline = time.monotonic() + (self._close_timeout_s if timeout is None else timeout)
        self.flush(max(deadline - time.monotonic(), 0.0))
        if self._own is own:
            self._own = None
        is_first = own.message_store.refuse()
        own.syncer.close(max(deadline - time.monotonic(), 0.05))
        ended = own.flusher.stop(max(deadline - time.monotonic(), 0.05))
        pending = own.message_store.buffer.pending
        if ended:
            own.message_store.close()  # a thread that could not start has not closed it
        else:
            # The thread is in a call to the broker, and unlocks the files after it.
            logger.warning(
                "The flusher thread did not end in time; %d messages are not confirmed. Messages on disk are "
                "sent later, other ones are reported to on_error.",
                pending,
                extra={"event": "buffer_flusher_not_stopped"},
            )
        for lane, message, state in own.message_store.left() if is_first else ():
            self.hooks.failed(BufferFull("the buffer was closed"), lane, message, state)
        return pending

    # -- inspection

    def snapshot(self) -> ProducerSnapshot:
        """Return the state of this process's buffer and of the shared folder."""
        own = self._mine()
        folder = self.persistence.folder
        log = None if folder is None else SpillLog(folder)
        message_store = None if own is None else own.message_store
        buffer = None if message_store is None else message_store.buffer
        index = None if message_store is None else message_store.segment_index
        return ProducerSnapshot(
            pending=0 if buffer is None else buffer.pending,
            in_memory=0 if buffer is None else buffer.messages,
            bytes=0 if buffer is None else buffer.bytes,
            age_s=0.0 if buffer is None or message_store is None else message_store.age_s(),
            spill_bytes=0 if index is None else index.bytes,
            owners=() if log is None else tuple(log.owners()),
            quarantined=() if log is None else tuple(log.quarantined_files()),
            degraded=message_store is not None and message_store.degraded,
            last_error="" if own is None else own.flusher.last_error,
            counters={} if message_store is None else asdict(message_store.counters),
        )


def _refuse_unusable(folder: Path) -> None:
    try:
        SpillLog(folder).try_out()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return  # a full disk is temporary; until then messages are held in memory
        raise ConfigurationError(
            f"dq_buffer_folder: {folder} cannot be used ({error.strerror or error}), so buffered messages "
            "would be lost with the process: give the folder to the user of this process, name another one, "
            "or set dq_buffer_folder = '' to hold messages in memory only"
        ) from error


def in_event_loop() -> bool:
    """Return whether an asyncio event loop runs in this thread, which must not be blocked."""
    return "asyncio" in sys.modules and asyncio._get_running_loop() is not None


def _call_at_exit(producer: BufferedProducer) -> None:
    reference, owner = weakref.ref(producer), OwnerProcess()

    def close() -> None:
        found = reference()
        if found is not None and owner.is_current:
            found.close()

    atexit.register(close)
    # A process of multiprocessing or billiard does not run atexit handlers. A child of Celery's prefork pool
    # does not run these either; app/api/buffer.py closes its buffer.
    for name in ("multiprocessing.util", "billiard.util"):
        module = sys.modules.get(name)
        if module is not None:
            module.Finalize(None, close, exitpriority=10)
