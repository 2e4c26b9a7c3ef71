"""``app.dq.buffer``: the buffered producer of an app, and snapshots of its spill log.

The snapshots include the files of other processes, and the quarantine. The lock of a folder shows whether its
process lives.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from celery import signals

from celery_dq.context import AppContext
from celery_dq.errors import ConfigurationError, CorruptRecord, CorruptSegment, InvalidRequest
from celery_dq.options.sections import BufferOptions
from celery_dq.private_files import read_file
from celery_dq.producer.buffer import BufferedMessage, Limits
from celery_dq.producer.buffered_producer import BufferedProducer, Persistence, ProducerSnapshot
from celery_dq.producer.flusher import Undelivered
from celery_dq.producer.segment import QuarantineContents, read_contents, read_header, scan
from celery_dq.producer.sender import Sender, State
from celery_dq.producer.spill_log import SUFFIX, FolderLock, SpillLog, process_name
from celery_dq.transport.message_record import MessageRecord

Delivered = TypeVar("Delivered", bound=Callable[[Sequence[str]], Any])
#: The password and the options in each broker URL of a list.
_SECRETS = re.compile(r"(://[^:/@]*):[^/]*(@)|\?[^;]*")
Failed = TypeVar("Failed", bound=Callable[[BaseException, Undelivered, State], Any])


class BufferApi:
    """Messages between ``apply_async`` and the broker. The first message starts the producer, not this class.

    Args:
        app: a Celery app.
        context: the context of the app, with its options.
        make_sender: makes the sender of a process.
    """

    _made: BufferedProducer | None = None

    def __init__(self, app: Any, context: AppContext, make_sender: Callable[[Any], Sender]) -> None:
        self._app = app
        self._context = context
        self._make_sender = make_sender
        #: The choice of the innermost :meth:`buffered` block; not set outside of one.
        self.wanted: ContextVar[bool] = ContextVar("dq_buffered")

    def __repr__(self) -> str:
        return f"<buffer of {self._context}: {len(self)} pending>"

    @property
    def options(self) -> BufferOptions:
        """The checked ``dq_buffer…`` settings."""
        options: BufferOptions = self._context.options.buffer
        return options

    @property
    def producer(self) -> BufferedProducer:
        """The buffered producer, made at first use.

        Raises:
            ConfigurationError: ``dq_buffer_folder`` is not set.
        """
        made = self._made
        if made is None:
            # Two threads may each make one, and both use the first. The other one has started nothing.
            made = self.__dict__.setdefault("_made", self._make())
            # A child of a prefork pool ends without the handlers of Python, billiard and multiprocessing.
            signals.worker_process_shutdown.connect(self._close_at_end_of_child)
        return made

    def _close_at_end_of_child(self, **_: Any) -> None:
        self.close()

    def _make(self) -> BufferedProducer:
        options = self.options
        if options.folder is None:
            raise ConfigurationError(
                "a call is to be buffered, but dq_buffer_folder is not set: name a folder that outlives "
                "the process, or '' for in memory only"
            )
        return BufferedProducer(
            lambda: self._make_sender(self._app),
            limits=Limits(
                options.batch_size, options.linger_us / 1e6, options.max_messages, options.max_bytes
            ),
            persistence=Persistence(
                self.folder, options.max_spill_bytes, options.sync_every, options.sync_interval_us / 1e6
            ),
            max_block_s=options.max_block_us / 1e6,
            close_timeout_s=options.close_timeout_us / 1e6,
        )

    @property
    def folder(self) -> Path | None:
        """The folder of the messages for this app's broker, inside ``dq_buffer_folder``.

        Messages for one broker must not be sent to another. The folder therefore depends on ``broker_url``
        (without its passwords), environment and key prefix.
        """
        if not self.options.folder:
            return None
        conf, options = self._app.conf, self._context.options
        # Not by urllib, which reads no list of servers.
        url = _SECRETS.sub(r"\1\2", str(conf.broker_write_url or conf.broker_url or ""))
        target = f"{url}\n{options.environment}\n{options.key_prefix}".encode()
        return Path(self.options.folder) / hashlib.blake2b(target, digest_size=6).hexdigest()

    # -- for programs

    def flush(self, timeout: float | None = None) -> int:
        """Send the messages buffered so far, and wait until the broker has confirmed them.

        A :meth:`close` by another thread ends the wait.

        Args:
            timeout: seconds; None waits without a limit.

        Returns:
            How many of these messages the broker has not confirmed; 0 when all are confirmed. After
            :meth:`replay` the messages of dead processes count too; an unread file counts as one.
        """
        return 0 if self._made is None else self._made.flush(timeout)

    async def aflush(self, timeout: float | None = None) -> int:
        """:meth:`flush` for asyncio. ``apply_async`` itself fits into a coroutine: it does not wait."""
        return 0 if self._made is None else await self._made.aflush(timeout)

    def flush_soon(self) -> None:
        """Send the messages buffered so far without lingering, and return at once."""
        if self._made is not None:
            self._made.flush_soon()

    def close(self, timeout: float | None = None) -> int:
        """Flush, end the thread, and close connection and files. The end of a process calls it.

        Args:
            timeout: seconds for all of these steps; default ``dq_buffer_close_timeout``.

        Returns:
            How many messages the broker has not confirmed. The next process sends those that are on disk.
        """
        return 0 if self._made is None else self._made.close(timeout)

    def replay(self) -> None:
        """Take over the messages of dead processes, and send them. The first message calls it.

        From then on :meth:`flush` waits for these messages as well, and counts them.
        """
        self.producer.start()

    @contextmanager
    def buffered(self, enabled: bool = True, *, timeout: float | None = None) -> Iterator[BufferApi]:
        """Buffer every call in the block (or none), and flush at its end.

        An exception in the block does not cancel the calls that were made before it.

        Args:
            enabled: whether the calls are buffered.
            timeout: seconds for the flush; None waits without a limit.

        Yields:
            This object.
        """
        token = self.wanted.set(enabled)
        try:
            yield self
        finally:
            self.wanted.reset(token)
            if enabled:
                self.flush(timeout)

    def on_delivered(self, hook: Delivered) -> Delivered:
        """Call `hook` with the task ids of each batch that the broker has confirmed. A decorator.

        It runs in the flusher's thread: its exceptions are logged, and nothing is sent while it runs.
        """
        self.producer.hooks.on_delivered.append(hook)
        return hook

    def on_error(self, hook: Failed) -> Failed:
        """Call `hook(exception, message, state)` for each message that will not be delivered. A decorator.

        State is ``"rejected"`` (the broker refuses it; it is in the quarantine), ``"not_sent"`` or
        ``"possibly_sent"`` (it was in memory only when the buffer was closed).
        """
        self.producer.hooks.on_error.append(hook)
        return hook

    # -- for people

    def __len__(self) -> int:
        """How many messages the broker has not confirmed."""
        return self.inspect().pending

    def inspect(self) -> ProducerSnapshot:
        """The state of this process's buffer, and of the folder that it shares."""
        if self._made is not None:
            return self._made.snapshot()
        if self.options.folder is None:
            return ProducerSnapshot(0, 0, 0, 0.0, 0, (), (), degraded=False, last_error="", counters={})
        return self.producer.snapshot()

    def quarantine(self) -> list[QuarantinedFile]:
        """The files with refused messages and damaged data, the oldest first."""
        return quarantined_files(self.folder)

    def replay_quarantined(self, name: str) -> int:
        """Send the readable messages of a file in the quarantine, and return their number.

        The file is removed. What cannot be read of it is kept as a new file. The broker recognises messages
        that an interrupted call has sent within the last hour.

        Args:
            name: Name of the file.

        Raises:
            InvalidRequest: There is no such file, or nothing in it can be read.
            DQError: The broker cannot be reached, or refuses the messages again. The file stays.
        """
        file = quarantined_file(self.folder, name)
        try:
            contents = read_contents(read_file(file.path))
        except OSError as error:
            raise InvalidRequest(f"{name} cannot be sent: {error.strerror or error}") from error
        if contents.problem and not contents.messages:
            raise InvalidRequest(
                f"{name} cannot be sent: {contents.problem}. Look at it by 'show', or remove it"
            )
        sender = self._make_sender(self._app)
        try:
            producer = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
            sender.send(contents.destination, producer, contents.messages)
        finally:
            sender.close()
        if contents.rest:
            SpillLog(file.path.parent.parent).copy_to_quarantine(file.path.stem, contents.rest)
        file.path.unlink(missing_ok=True)
        return len(contents.messages)

    def remove_quarantined(self, name: str) -> None:
        """Remove a file from the quarantine, with its messages.

        Raises:
            InvalidRequest: There is no such file.
        """
        quarantined_file(self.folder, name).path.unlink(missing_ok=True)

    def spill(self) -> Spill:
        """Survey the folder of all processes, alive and dead. Reads every file in it."""
        return survey(self.folder)


OwnerState: TypeAlias = Literal["this process", "alive", "dead", "elsewhere"]


@dataclass(frozen=True)
class Owner:
    """The folder of one process.

    Attributes:
        name: Name of the folder.
        state: State of its process. ``elsewhere`` means that it lives on another machine or in another
            container. The messages of a dead process, wherever it ran, are sent by another process of the
            app, or by ``celery dq spill replay``.
        pending: Number of messages in its files. All messages of a file count until its last one is
            delivered.
        bytes: Size of its files.
        age_s: Seconds since the last write to its oldest file.
        damaged: Number of files that cannot be read to their end.
    """

    name: str
    state: OwnerState
    pending: int
    bytes: int
    age_s: float
    damaged: int


@dataclass(frozen=True)
class Spill:
    """The spill log of an app.

    Attributes:
        folder: Path of the folder; None when messages are in memory only.
        pending: Number of messages in it.
        bytes: Size of the files of all processes.
        age_s: Seconds since the last write to the oldest file.
        owners: The folders of the processes.
        quarantined: Files with damaged or refused messages.
    """

    folder: Path | None
    pending: int
    bytes: int
    age_s: float
    owners: tuple[Owner, ...]
    quarantined: tuple[Path, ...]


@dataclass(frozen=True)
class SpillFiles:
    """The sizes and times of the files of a spill log.

    Attributes:
        bytes: Size of the files of all processes.
        age_s: Seconds since the last write to the oldest file; 0 without files.
        quarantined: Number of files with damaged or refused messages.
    """

    bytes: int
    age_s: float
    quarantined: int


def spill_files(folder: Path) -> SpillFiles:
    """Look at the files below `folder` without reading them."""
    log = SpillLog(folder)
    size, oldest = 0, time.time()
    now = oldest
    for owner in log.owners():
        for path in (folder / owner).glob(f"*{SUFFIX}"):
            with suppress(OSError):  # its messages were delivered meanwhile
                status = path.stat()
                size, oldest = size + status.st_size, min(oldest, status.st_mtime)
    return SpillFiles(size, max(now - oldest, 0.0), len(log.quarantined_files()))


def survey(folder: Path | None) -> Spill:
    """Read all files below `folder` and count their messages. None has no files."""
    if folder is None:
        return Spill(None, 0, 0, 0.0, (), ())
    log = SpillLog(folder)
    owners = tuple(_look_at(folder / name) for name in log.owners())
    return Spill(
        folder,
        sum(owner.pending for owner in owners),
        sum(owner.bytes for owner in owners),
        max((owner.age_s for owner in owners), default=0.0),
        owners,
        tuple(log.quarantined_files()),
    )


def _look_at(folder: Path) -> Owner:
    pending = size = damaged = 0
    oldest = now = time.time()
    for data, written_at in _files(folder):
        size += len(data)
        try:
            _, start, seed = read_header(data)
        except CorruptSegment:
            damaged += bool(data)
            continue
        found = scan(data, start, seed)
        if found.messages:
            pending += len(found.messages)
            oldest = min(oldest, written_at)
        # A file that is being written may end with an incomplete record, which counts as damage for a moment.
        damaged += bool(found.problem)
    return Owner(folder.name, _state_of(folder), pending, size, max(now - oldest, 0.0), damaged)


def _files(folder: Path) -> Iterator[tuple[bytes, float]]:
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with suppress(OSError):  # its messages were delivered meanwhile
            yield read_file(path, is_trusted=False), path.stat().st_mtime


def _state_of(folder: Path) -> OwnerState:
    try:
        if FolderLock.is_own(folder.stat(follow_symlinks=False)):
            return "this process"
        # An adopting process asks the same. A name proves nothing about the processes of another container.
        lock = FolderLock.acquire(folder, is_trusted=False)
    except OSError:
        lock = None
    if lock is not None:
        lock.release()
        return "dead"
    process = folder.name.partition("-")[0]
    return "alive" if process.rpartition(".")[2] == process_name().rpartition(".")[2] else "elsewhere"


@dataclass(frozen=True)
class QuarantinedMessage:
    """A message in the quarantine.

    Attributes:
        id: The task id.
        queue: Name of the queue; "" for a message to another broker.
        task: Name of the task; "" when it is not known.
        tenant: The tenant; "" when it is not known.
        bytes: Size of the packed message.
    """

    id: str
    queue: str
    task: str
    tenant: str
    bytes: int


@dataclass(frozen=True)
class QuarantinedFile:
    """A file in the quarantine.

    Attributes:
        name: Name of the file.
        path: Its path.
        bytes: Its size.
        at: Its last change.
        messages: The messages that can be read.
        problem: Why the rest cannot be read; "" when all of the file can.
    """

    name: str
    path: Path
    bytes: int
    at: datetime
    messages: tuple[QuarantinedMessage, ...]
    problem: str


def quarantined_files(folder: Path | None) -> list[QuarantinedFile]:
    """Read all files in the quarantine of a spill log, the oldest first. None has no files."""
    found = []
    for path in () if folder is None else SpillLog(folder).quarantined_files():
        with suppress(FileNotFoundError):  # another process has removed it
            found.append(_look_into(path))
    return sorted(found, key=lambda each: each.at)


def quarantined_file(folder: Path | None, name: str) -> QuarantinedFile:
    """Return the file of a name.

    Raises:
        InvalidRequest: There is none.
    """
    for each in quarantined_files(folder):
        if each.name == name:
            return each
    raise InvalidRequest(
        f"No file {name!r} is in the quarantine; 'celery dq spill quarantine list' shows all"
    )


def _look_into(path: Path) -> QuarantinedFile:
    status = path.stat(follow_symlinks=False)
    try:
        contents = read_contents(read_file(path, is_trusted=False))
    except OSError as error:
        contents = QuarantineContents("", (), str(error.strerror or error), b"")
    at = datetime.fromtimestamp(status.st_mtime, timezone.utc)
    queue = contents.destination.partition("/")[2] if contents.destination.startswith("p") else ""
    described = tuple(_described(queue, each) for each in contents.messages)
    return QuarantinedFile(path.name, path, status.st_size, at, described, contents.problem)


def _described(queue: str, message: BufferedMessage) -> QuarantinedMessage:
    task = tenant = ""
    if queue:
        with suppress(CorruptRecord):
            record = MessageRecord.unpack(message.payload)
            task, tenant = record.task, record.tenant
    return QuarantinedMessage(
        message.id.decode("utf-8", "replace"), queue, task, tenant, len(message.payload)
    )
