"""Files that hold messages until the broker has them. A delivered message has no file any more.

::

    <root>/                          0700, may be shared by any number of processes
        <process>-<random>/          one per process, which owns it while it holds the lock on `lock`
            lock                     see below
            0000000000000001.seg     see celery_dq.producer.segment
        quarantine/                  unreadable files, kept for an operator

A process never appends to a file of another process.

The lock is a POSIX lock (``lockf``). It ends with the process in every case, and a forked child does not
inherit it. It also ends when the process closes *any* descriptor of the file, and it excludes other processes
only. A process must therefore never open the lock file of a folder that it has locked. It remembers these
folders by their inodes. Names prove nothing, because in a container a process may have the pid and the start
time of an earlier one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import sys
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

from celery_dq.errors import CorruptSegment, SpillFailed
from celery_dq.per_process import PerProcess, start_of
from celery_dq.private_files import check_parents, open_folder, read_file
from celery_dq.producer.buffer import BufferedMessage
from celery_dq.producer.segment import (
    FileHeader,
    SegmentScan,
    pack_header,
    pack_record,
    read_header,
    scan,
)
from celery_dq.shown import shown_logger

logger = shown_logger(__name__)

LOCK = "lock"
OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
_Inode = tuple[int, int]


def _inode(status: os.stat_result) -> _Inode:
    return status.st_dev, status.st_ino


class FolderLock:
    """A folder that this process has locked.

    Attributes:
        path: The folder.
        folder: Its descriptor, by which its files are reached; -1 after :meth:`release`.
        file: Descriptor of its lock file; -1 before it is locked and after :meth:`release`.
        inode: The number of the folder, with its device.
    """

    #: The folders that this process has locked.
    _held: PerProcess[dict[_Inode, FolderLock]] = PerProcess(dict)

    def __init__(self, path: Path, folder: int) -> None:
        self.path = path
        self.folder = folder
        self.file = -1
        self.inode = _inode(os.fstat(folder))

    @classmethod
    def acquire(cls, path: Path, dir_fd: int | None = None, *, is_trusted: bool = True) -> FolderLock | None:
        """Lock a folder.

        Args:
            path: The folder.
            dir_fd: Descriptor of the folder above it.
            is_trusted: Whether no other user may be able to change the folder.

        Returns:
            None when a process holds the lock, which may be this one.

        Raises:
            PermissionError: Another user can change the folder.
            OSError: The folder cannot be opened.
        """
        name = path if dir_fd is None else path.name
        lock = cls(path, open_folder(name, dir_fd, is_trusted=is_trusted))
        # Threads of this process meet here; one of them goes on.
        if cls._held.get().setdefault(lock.inode, lock) is lock:
            file = lock_file(LOCK, lock.folder)
            if file is not None:
                lock.file = file
                return lock
            del cls._held.get()[lock.inode]
        os.close(lock.folder)
        return None

    @classmethod
    def is_own(cls, status: os.stat_result) -> bool:
        """Whether this process has locked the folder with this status."""
        return _inode(status) in cls._held.get()

    @property
    def stands(self) -> bool:
        """Whether the path still leads to the locked file."""
        try:
            there = os.stat(self.path / LOCK, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self.file))

    def names(self, suffix: str) -> list[str]:
        """Return the names of the files in the folder that end so. May raise OSError."""
        return [name for name in os.listdir(self.folder) if name.endswith(suffix)]

    def remove(self) -> None:
        """Remove the folder, unless there are files of the user in it. The lock is still held."""
        with contextlib.suppress(OSError):
            os.unlink(LOCK, dir_fd=self.folder)
            self.path.rmdir()

    def forsake(self) -> None:
        """Unlock the folder for other processes. This one does not adopt it: it has the messages."""
        status = os.fstat(self.folder)
        if not (status.st_nlink and self.is_own(status)):
            self.release()  # it was removed, or this is a forked child
            return
        with contextlib.suppress(OSError):
            os.close(self.file)
        self.file = -1

    def release(self) -> None:
        """Unlock the folder."""
        for fd in (self.file, self.folder):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.file = self.folder = -1
        # At last: until then no other thread of this process can take the lock, and lose it here.
        self._held.get().pop(self.inode, None)


def lock_file(path: Path | str, dir_fd: int | None = None) -> int | None:
    """Lock a file, which is made if it is missing.

    Returns:
        The descriptor of the file; None when another process holds the lock, or the file is gone.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | OPEN, 0o600, dir_fd=dir_fd)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path, dir_fd=dir_fd, follow_symlinks=False)):
            return fd
    os.close(fd)
    return None


sync_data = os.fdatasync if sys.platform == "linux" else os.fsync
SUFFIX = ".seg"
QUARANTINE = "quarantine"
_NEW = os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def sync_folder(folder: Path) -> None:
    """Write the entries of a folder, and its own entry in its parent, to disk.

    Raises:
        OSError: A folder cannot be opened or synced.
    """
    for each in (folder, folder.parent):
        _sync_names(each)


def make_folder(folder: Path) -> None:
    """Make a folder, and its missing parents, and write their entries to disk. Only this user may access it.

    Raises:
        OSError: A folder cannot be made or synced.
    """
    missing = []
    for each in (folder, *folder.parents):
        if each.exists():
            break
        missing.append(each)
    for each in reversed(missing):
        each.mkdir(0o700, exist_ok=True)
    for each in missing:
        _sync_names(each.parent)


def _sync_names(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def process_name() -> str:
    """Return a name that no other process on this machine has had: pid, start time, and CRC of the host name.

    The start time is empty where ``/proc`` does not exist.
    """
    return f"{os.getpid()}.{start_of(os.getpid())}.{zlib.crc32(socket.gethostname().encode()):08x}"


class Segment:
    """A file that this process appends to.

    Args:
        path: Path of the new file.
        header: Header that is written to it.

    Attributes:
        size: Bytes of the file, header included.
        last: Sequence of the last record; -1 without any.
        count: Number of records.
        synced: Bytes that the disk has confirmed.
        torn: Whether an incomplete record at the end could not be cut off, so that nothing may be appended.
        poisoned: Whether a sync failed, so that the content on disk is unknown.
        gone: Whether the file was removed.

    Raises:
        OSError: The file cannot be created.
    """

    __slots__ = (
        "count",
        "fd",
        "gone",
        "header",
        "header_size",
        "last",
        "path",
        "poisoned",
        "seed",
        "size",
        "synced",
        "torn",
    )

    def __init__(self, path: Path, header: FileHeader) -> None:
        self.path = path
        self.header = header
        head, self.seed = pack_header(header)
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND | _NEW, 0o600)
        self.header_size = self.size = len(head)
        self.last = -1
        self.count = 0
        self.synced = 0
        self.torn = self.poisoned = self.gone = False
        try:
            if os.write(self.fd, head) != len(head):
                raise OSError("the header was written in part only")
        except OSError:
            self.unlink()
            raise

    def append(self, message: BufferedMessage) -> int:
        """Write the record of one message with a single write, without a sync.

        Returns:
            The size of the record in bytes.

        Raises:
            SpillFailed: The record was not written, and an incomplete part was cut off again. If that failed
                too, the segment is `torn`.
        """
        data = pack_record(message, self.seed)
        try:
            written = os.write(self.fd, data)
        except OSError as error:
            self._cut_back()
            raise SpillFailed(f"{self.path}: {error.strerror}") from error
        if written != len(data):
            self._cut_back()
            raise SpillFailed(
                f"{self.path}: only {written} of {len(data)} bytes could be written: the disk is full"
            )
        self.size += written
        self.last = message.sequence
        self.count += 1
        return written

    def _cut_back(self) -> None:
        try:
            os.ftruncate(self.fd, self.size)
        except OSError:
            self.torn = True

    def sync(self) -> None:
        """Write the file to disk.

        Raises:
            OSError: This sync or an earlier one failed, so records may be lost. A repeated sync would succeed
                without writing them.
        """
        if self.poisoned or self.synced < self.size:
            PendingSync(self).sync()

    def empty(self) -> None:
        """Remove all records, which are delivered, and keep the file open. May raise OSError."""
        os.ftruncate(self.fd, self.header_size)
        self.size = self.header_size
        self.count = 0
        self.synced = min(self.synced, self.size)

    def seal(self) -> None:
        """Close the descriptor; nothing is appended any more."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def unlink(self) -> None:
        """Remove the file, whose records are delivered."""
        self.gone = True
        self.seal()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def read(self) -> SegmentScan:
        """Read the records back, without the header, which this process knows. May raise OSError."""
        found = scan(read_file(self.path)[: self.size], self.header_size, self.seed)
        missing = self.count - len(found.messages)
        problem = found.problem or ("the end of the file is missing" if missing else "")
        return found._replace(problem=problem, missing=missing)


class PendingSync:
    """A file to sync without the lock of the message store: threads may append to it, seal or remove it.

    Args:
        segment: The file.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._size = segment.size
        self._first = not segment.synced
        # A duplicate, because the segment may close its descriptor, and a new file could get the same number.
        # A sealed segment has no descriptor, and is synced again only after a failed sync.
        self._fd = os.dup(segment.fd) if segment.fd >= 0 else -1

    def sync(self) -> None:
        """Write the file to disk.

        Raises:
            OSError: This sync or an earlier one failed. The kernel reports a failure only once, so every
                later call raises too.
        """
        try:
            if self.segment.poisoned:
                raise OSError(errno.EIO, "an earlier sync failed")
            sync_data(self._fd)
            if self._first:
                sync_folder(self.segment.path.parent)
            self.segment.synced = max(self.segment.synced, min(self._size, self.segment.size))
        except OSError:
            self.segment.poisoned = True
            raise
        finally:
            if self._fd >= 0:
                os.close(self._fd)


class StoredSegment:
    """A file of a dead process, with at least one message."""

    count = 1
    __slots__ = ("_folder", "header", "path")

    def __init__(self, folder: FolderLock, name: str, header: FileHeader) -> None:
        self._folder = folder
        self.path = folder.path / name
        self.header = header

    def unlink(self) -> None:
        """Remove the file, whose records are delivered."""
        with contextlib.suppress(OSError):
            os.unlink(self.path.name, dir_fd=self._folder.folder)

    def read(self) -> SegmentScan:
        """Read the records. May raise OSError or CorruptSegment."""
        data = read_file(self.path.name, self._folder.folder)
        _, start, seed = read_header(data)
        return scan(data, start, seed)


class Orphan:
    """The adopted folder of a dead process. No other process can adopt it until :meth:`close`."""

    def __init__(self, lock: FolderLock, log: SpillLog) -> None:
        self.folder = lock.path
        self._lock = lock
        self._log = log

    def segments(self) -> list[StoredSegment]:
        """Return the segments, oldest first; damaged ones go to the quarantine. May raise OSError."""
        found = [segment for name in self._lock.names(SUFFIX) if (segment := self._open(name)) is not None]
        return sorted(found, key=lambda each: (each.header.producer, each.header.number))

    def _open(self, name: str) -> StoredSegment | None:
        head = read_file(name, self._lock.folder, limit=8192)
        if not head:  # the process died before it wrote the header
            os.unlink(name, dir_fd=self._lock.folder)
            return None
        try:
            return StoredSegment(self._lock, name, read_header(head)[0])
        except CorruptSegment as problem:
            self._log.quarantine(self.folder / name, str(problem), 1)
            return None

    def abandon(self) -> None:
        """Close, in a forked child, the inherited descriptors. The parent keeps its lock."""
        self._lock.release()

    def close(self) -> None:
        """Unlock the folder, and remove it if it holds no segment."""
        with contextlib.suppress(OSError):
            if not self._lock.names(SUFFIX):
                self._lock.remove()
        self._lock.release()


class SpillLog:
    """The files of one process, and its view of the files of other processes. Not thread-safe.

    Args:
        root: The shared folder. Messages survive only the failures that this folder survives.

    Attributes:
        unreadable: Messages that could not be read since the process began, as far as their number is known.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.process = process_name()
        self.unreadable = 0
        #: Why folders of dead processes were not adopted at the last search.
        self.refused: OSError | None = None
        #: Damaged files that could not be moved to the quarantine; each is logged once.
        self._stuck: set[Path] = set()
        self._lock: FolderLock | None = None
        self._number = 0

    # -- the folder of this process

    @property
    def folder(self) -> Path | None:
        """Folder of this process; None before the first segment."""
        return None if self._lock is None else self._lock.path

    def create(self, producer: bytes, lane: str, number: int = 0) -> Segment:
        """Create a segment.

        Args:
            producer: Producer sequence that numbers its records.
            lane: Destination of its records.
            number: Number of the segment that it replaces, which gives its place in the order; 0 appends.

        Raises:
            SpillFailed: The disk is full, or the folder cannot be used.
        """
        try:
            folder = self.folder or self._open_folder()
            self._number += 1
            header = FileHeader(producer, number or self._number, lane)
            return Segment(folder / f"{self._number:016x}{SUFFIX}", header)
        except OSError as error:
            raise SpillFailed(f"{self.folder or self.root}: {error.strerror or error}") from error

    def intact(self) -> bool:
        """Return whether the folder still exists and this process still owns it."""
        return self._lock is None or self._lock.stands

    def forsake(self) -> None:
        """Use a new folder from the next segment on. Other processes may adopt the old one."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.forsake()

    def close(self) -> None:
        """Unlock the folder. Without a segment it is removed; else a later process adopts it."""
        with contextlib.suppress(OSError):
            if self._lock is not None and not self._lock.names(SUFFIX):
                self._lock.remove()
        self._drop_lock()

    def _drop_lock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _open_folder(self) -> Path:
        make_folder(self.root)
        os.close(self._open_root())
        for _ in range(10):
            folder = self.root / f"{self.process}-{uuid.uuid4().hex}"
            folder.mkdir(0o700)
            with contextlib.suppress(FileNotFoundError):  # an adopting process took it for a dead one's
                self._lock = FolderLock.acquire(folder)
                if self._lock is not None:
                    return folder
        raise OSError(f"no folder in {self.root} can be locked: use a file system that supports POSIX locks")

    def try_out(self) -> None:
        """Make a folder as for messages, and remove it. OSError means that the root cannot hold messages."""
        self._open_folder()
        self.close()

    def _open_root(self) -> int:
        """Open the shared folder. May raise OSError, also because another user can change it."""
        fd = open_folder(self.root)
        try:
            check_parents(self.root)
        except BaseException:
            os.close(fd)
            raise
        return fd

    # -- folders of other processes

    def orphans(self) -> Iterator[Orphan]:
        """Adopt the folders of dead processes, oldest first. :attr:`refused` says if there are others."""
        self.refused = None
        try:
            root = self._open_root()
        except FileNotFoundError:
            return
        except OSError as error:
            self.refused = error
            return
        try:
            for name in self._other_folders(root):
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=root)  # it is empty: its process is gone, or makes another one
                    continue
                try:
                    lock = FolderLock.acquire(self.root / name, root)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self.refused = error
                    continue
                if lock is not None:
                    yield Orphan(lock, self)
        finally:
            os.close(root)

    def _other_folders(self, root: int) -> list[str]:
        found = []
        with os.scandir(root) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    is_process = entry.is_dir(follow_symlinks=False) and entry.name != QUARANTINE
                    # Opening and closing a lock file that this process holds would end the lock.
                    if is_process and not FolderLock.is_own(status):
                        found.append((status.st_mtime, entry.name))
        return [name for _, name in sorted(found)]

    def owners(self) -> list[str]:
        """Return the names of all process folders, alive or dead, including the one of this process."""
        with contextlib.suppress(OSError):
            return sorted(
                entry.name
                for entry in os.scandir(self.root)
                if entry.is_dir(follow_symlinks=False) and entry.name != QUARANTINE
            )
        return []

    def usage(self) -> int:
        """Return the bytes of all files below the root, quarantine included."""
        total = 0
        for folder, _, files in os.walk(self.root):
            for name in files:
                with contextlib.suppress(OSError):
                    total += os.stat(os.path.join(folder, name), follow_symlinks=False).st_size
        return total

    # -- the quarantine

    def quarantined_files(self) -> list[Path]:
        """Return the files in the quarantine."""
        return sorted((self.root / QUARANTINE).glob("*"))

    def read(self, segment: Segment | StoredSegment) -> list[BufferedMessage] | None:
        """Read a file, and copy its damaged parts to the quarantine.

        Returns:
            The messages of the valid records. None when the file itself is in the quarantine, because it
            cannot be read at all or the copy cannot be written.
        """
        try:
            found = segment.read()
            if not found.problem:
                return found.messages
            name = f"{segment.path.parent.name}-{segment.path.stem}"
            copy = self.copy_to_quarantine(name, pack_header(segment.header)[0] + found.damaged)
        except (OSError, CorruptSegment) as error:
            self.quarantine(segment.path, str(error), segment.count)
            return None
        self.unreadable += found.missing
        logger.error(
            "Spill log file %s is damaged: %s. At least %d of its messages cannot be read, the other %d are "
            "sent. The damaged parts were kept as %s.",
            segment.path,
            found.problem,
            found.missing,
            len(found.messages),
            copy,
            extra={"event": "spill_damaged"},
        )
        return found.messages

    def copy_to_quarantine(self, name: str, data: bytes) -> Path:
        """Write a file to the quarantine. Return its path. The same data have one file.

        Raises:
            OSError: The file cannot be written.
        """
        name += f"-{zlib.crc32(data):08x}.bad"
        folder = self._open_quarantine()
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | OPEN, 0o600, dir_fd=folder)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(fd)
                sync_folder(self.root / QUARANTINE)
            except OSError:
                os.unlink(name, dir_fd=folder)
                raise
        finally:
            os.close(folder)
        return self.root / QUARANTINE / name

    def _open_quarantine(self) -> int:
        folder = self.root / QUARANTINE
        folder.mkdir(0o700, exist_ok=True)
        return open_folder(folder)

    def quarantine(self, path: Path, problem: str, messages: int) -> None:
        """Move a file to the quarantine. Does not raise.

        Args:
            path: The file.
            problem: Why the file cannot be used, for the log.
            messages: Number of its messages, as far as it is known.
        """
        target = self.root / QUARANTINE / f"{path.parent.name}-{path.stem}-{uuid.uuid4().hex[:8]}.bad"
        if path not in self._stuck:
            self.unreadable += messages
        try:
            os.close(self._open_quarantine())
            path.rename(target)
        except OSError as error:
            if path in self._stuck:
                return
            self._stuck.add(path)
            text = "Spill log file %s cannot be used: %s. It could not be moved to quarantine file %s: %s."
            logger.error(text, path, problem, target, error, extra={"event": "spill_quarantine_failed"})
        else:
            self._stuck.discard(path)
            text = "Spill log file %s cannot be used: %s. Its messages are not sent; it was kept as %s."
            logger.error(text, path, problem, target, extra={"event": "spill_quarantined"})
