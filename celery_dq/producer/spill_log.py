"""Files that hold messages until the broker has them. No ledger: delivered is what has no file any more.

::

    <root>/                          0700, may be shared by any number of processes
        <process>-<random>/          one per process; ours while we hold the lock on `lock`
            lock                     see celery_dq.producer.folder_lock
            0000000000000001.seg     see celery_dq.producer.segment
        quarantine/                  what could not be read, kept for a person to look at

Nothing is appended to an earlier process's file.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import socket
import stat
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

from celery_dq.errors import CorruptSegment, SpillFailed
from celery_dq.producer.disk import sync_data, sync_folder
from celery_dq.producer.folder_lock import LOCK, OPEN, is_marked, lock_file, mark, unlock_orphan
from celery_dq.producer.segment import Header, Record, pack_header, pack_record, read_header, scan

__all__ = ["Orphan", "Segment", "SpillLog", "StoredSegment"]

logger = logging.getLogger(__name__)

SUFFIX = ".seg"
QUARANTINE = "quarantine"
_NEW = os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def process_name() -> str:
    """Names this process among all that ever ran on this machine, as far as one can know."""
    started = ""
    with contextlib.suppress(OSError, IndexError):
        # Field 22, counted behind the command, which may hold anything: ticks since boot.
        started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return f"{os.getpid()}.{started}.{zlib.crc32(socket.gethostname().encode()):08x}"


class Segment:
    """A file that this process appends to."""

    __slots__ = (
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

    def __init__(self, path: Path, header: Header) -> None:
        """Create the file. Raises OSError."""
        self.path = path
        self.header = header
        head, self.seed = pack_header(header)
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND | _NEW, 0o600)
        self.header_size = self.size = len(head)
        self.last = -1
        self.synced = 0
        #: `poisoned`: the disk did not write all of it. `gone`: nobody needs it any more.
        self.torn = self.poisoned = self.gone = False
        try:
            if os.write(self.fd, head) != len(head):
                raise OSError("the header was written in part only")
        except OSError:
            self.unlink()
            raise

    def append(self, sequence: int, flags: int, payload: bytes) -> int:
        """Write one record with one unsynced write, and return its size.

        Raises:
            SpillFailed: Nothing of it is there: what was written was cut off again. Where even that
                failed the segment is `torn`: append to another one.
        """
        data = pack_record(sequence, flags, payload, self.seed)
        try:
            written = os.write(self.fd, data)
        except OSError as error:
            self._cut_back()
            raise SpillFailed(f"{self.path}: {error.strerror}") from error
        if written != len(data):
            self._cut_back()
            raise SpillFailed(
                f"{self.path}: {written} of {len(data)} bytes could be written: the disk is full"
            )
        self.size += written
        self.last = sequence
        return written

    def _cut_back(self) -> None:
        try:
            os.ftruncate(self.fd, self.size)
        except OSError:
            self.torn = True

    def sync(self) -> None:
        """Have the disk write it. Raises OSError: what was appended may be gone, and asking again lies."""
        if self.poisoned:
            raise OSError(errno.EIO, "an earlier sync failed")
        if self.synced < self.size:
            size = self.size
            try:
                sync_data(self.fd)
                if not self.synced:
                    sync_folder(self.path.parent)
            except OSError:
                self.poisoned = True
                raise
            self.synced = size

    def empty(self) -> None:
        """All its records are delivered: cut them off, go on with the file. Raises OSError."""
        os.ftruncate(self.fd, self.header_size)
        self.size = self.header_size
        self.synced = min(self.synced, self.size)

    def seal(self) -> None:
        """Append no more."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def unlink(self) -> None:
        """Its records are delivered: the file goes."""
        self.gone = True
        self.seal()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def read(self) -> list[Record]:
        """Read the records back. Raises OSError or CorruptSegment."""
        data = _read(self.path)
        _, start, seed = read_header(data)
        return scan(data[: self.size], start, seed).records


class StoredSegment:
    """A file that another process, now dead, left behind."""

    __slots__ = ("header", "path", "size")

    def __init__(self, path: Path, header: Header, size: int) -> None:
        self.path = path
        self.header = header
        self.size = size

    def unlink(self) -> None:
        """Its records are delivered: the file goes."""
        with contextlib.suppress(OSError):
            self.path.unlink()


class Orphan:
    """The folder of a dead process, adopted: nobody else will while :meth:`close` was not called."""

    def __init__(self, folder: Path, lock: int, log: SpillLog) -> None:
        self.folder = folder
        self._lock = lock
        self._log = log

    def segments(self) -> list[StoredSegment]:
        """Its segments, oldest first; one whose header is damaged is quarantined. Raises OSError."""
        found = [
            segment for path in self.folder.glob(f"*{SUFFIX}") if (segment := self._open(path)) is not None
        ]
        return sorted(found, key=lambda each: (each.header.producer, each.header.number))

    def _open(self, path: Path) -> StoredSegment | None:
        with path.open("rb") as file:
            head = file.read(8192)
        if not head:  # its process died between making and writing it: nothing was ever in it
            path.unlink()
            return None
        try:
            return StoredSegment(path, read_header(head)[0], path.stat().st_size)
        except CorruptSegment as problem:
            self._log.quarantine(path, str(problem))
            return None

    def read(self, segment: StoredSegment) -> list[Record]:
        """The longest valid prefix of a segment; what follows is copied to the quarantine.

        Raises:
            OSError: The file cannot be read now; it stays.
        """
        data = _read(segment.path)
        try:
            _, start, seed = read_header(data)
        except CorruptSegment as problem:
            self._log.quarantine(segment.path, str(problem))
            return []
        found = scan(data, start, seed)
        if found.problem:
            self._log.quarantine(segment.path, found.problem, data[found.end :])
        return found.records

    def close(self) -> None:
        """Let it go; the folder goes too when no segment is left in it."""
        if not any(self.folder.glob(f"*{SUFFIX}")):
            # While the lock is held: who opens the file now finds that it is not the folder's any more.
            shutil.rmtree(self.folder, ignore_errors=True)
        unlock_orphan(self.folder, self._log.process, self._lock)
        self._log.adopted.discard(self.folder.name)


class SpillLog:
    """The files of one process, and its view of those of the others. Not thread-safe.

    :param root: the shared folder. It must survive what the messages are to survive.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.process = process_name()
        self.quarantined = 0
        self.adopted: set[str] = set()
        self._folder: Path | None = None
        self._lock = -1
        self._number = 0

    # -- our own

    @property
    def folder(self) -> Path | None:
        """The folder of this process; None before the first segment."""
        return self._folder

    def create(self, producer: bytes, lane: str, number: int = 0) -> Segment:
        """A new segment.

        :param number: of the one whose place it takes among those of the producer; 0: it comes last.

        Raises:
            SpillFailed: The disk is full, or the folder cannot be used.
        """
        try:
            folder = self._folder or self._open_folder()
            self._number += 1
            header = Header(producer, number or self._number, lane)
            return Segment(folder / f"{self._number:016x}{SUFFIX}", header)
        except OSError as error:
            raise SpillFailed(f"{self._folder or self.root}: {error.strerror or error}") from error

    def intact(self) -> bool:
        """Whether the folder is still there and ours; somebody may have cleaned up, or taken it."""
        if self._folder is None:
            return True
        try:
            there = os.stat(self._folder / LOCK, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._lock))

    def forsake(self) -> None:
        """Begin a new folder with the next segment; the old one, if it is still there, is an orphan."""
        self._folder = None
        self._drop_lock()

    def close(self) -> None:
        """Remove the folder if it holds no segment; else leave it to whoever adopts it."""
        folder, self._folder = self._folder, None
        if folder is not None and not any(folder.glob(f"*{SUFFIX}")):
            shutil.rmtree(folder, ignore_errors=True)
        self._drop_lock()

    def _drop_lock(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            with contextlib.suppress(OSError):
                os.close(lock)

    def _open_folder(self) -> Path:
        self.check_root()
        for _ in range(10):
            folder = self.root / f"{self.process}-{uuid.uuid4().hex}"
            folder.mkdir(0o700)
            lock = lock_file(folder / LOCK, create=True)
            if lock is not None:
                self._lock = lock
                self._folder = folder
                return folder
        raise OSError(f"no folder in {self.root} can be locked: does its file system know POSIX locks?")

    def check_root(self) -> None:
        """Make the shared folder, or see that it is fit.

        Raises:
            OSError: It cannot be made, or everybody may write to it.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = self.root.stat().st_mode
        if mode & stat.S_IWOTH:
            raise PermissionError(
                0,
                f"everybody may write to it (mode {stat.S_IMODE(mode):o}): chmod o-w, or use another folder",
            )

    # -- the others'

    def orphans(self) -> Iterator[Orphan]:
        """Adopt the folders of processes that are gone, oldest first."""
        folders = []
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.root):
                with contextlib.suppress(OSError):
                    if self._may_be_orphan(entry):
                        folders.append((entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)))
        for _, folder in sorted(folders):
            with contextlib.suppress(OSError):
                if not any(folder.iterdir()):
                    folder.rmdir()  # its process died while it made it; one that makes it now makes another
                    continue
                lock = lock_file(folder / LOCK, create=any(folder.glob(f"*{SUFFIX}")))
                if lock is not None and mark(folder, self.process):
                    self.adopted.add(folder.name)
                    yield Orphan(folder, lock, self)

    def _may_be_orphan(self, entry: os.DirEntry[str]) -> bool:
        return (
            entry.is_dir(follow_symlinks=False)
            and entry.name != QUARANTINE
            # To open a lock file of our own process, or one that it has adopted, would end its lock.
            and not entry.name.startswith(f"{self.process}-")
            and entry.name not in self.adopted
            and not is_marked(entry.path, self.process)
            and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
        )

    def owners(self) -> list[str]:
        """The names of all folders, ours included: one per process, alive or dead."""
        with contextlib.suppress(OSError):
            return sorted(
                entry.name
                for entry in os.scandir(self.root)
                if entry.is_dir(follow_symlinks=False) and entry.name != QUARANTINE
            )
        return []

    def usage(self) -> int:
        """Bytes of everything below the root, quarantine included."""
        total = 0
        for folder, _, files in os.walk(self.root):
            for name in files:
                with contextlib.suppress(OSError):
                    total += os.stat(os.path.join(folder, name), follow_symlinks=False).st_size
        return total

    # -- what cannot be read, or is refused

    def quarantined_files(self) -> list[Path]:
        """The files in the quarantine."""
        return sorted((self.root / QUARANTINE).glob("*"))

    def quarantine(self, path: Path, problem: str, data: bytes | None = None) -> None:
        """Put a file aside (or only `data`, a part of it), and go on. Does not raise."""
        self.quarantined += 1
        folder = self.root / QUARANTINE
        target = folder / f"{path.parent.name}-{path.stem}-{uuid.uuid4().hex[:8]}.bad"
        logger.error("Spill log: %s: %s. Kept as %s.", path, problem, target)
        try:
            folder.mkdir(0o700, exist_ok=True)
            if data is None:
                path.rename(target)
            else:
                fd = os.open(target, os.O_WRONLY | _NEW, 0o600)
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
        except OSError as error:
            logger.error("Spill log: %s cannot be put aside: %s.", path, error)


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | OPEN)
    with os.fdopen(fd, "rb") as file:
        return file.read()
