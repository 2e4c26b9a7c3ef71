"""The lock that shows which process owns a folder of the spill log.

The lock is a POSIX lock (``lockf``). It ends with the process in every case, and a forked child does not
inherit it. It also ends when the process closes *any* descriptor of the file, and it excludes other processes
only.

A process must therefore never open the lock file of a folder that it has locked. It remembers these folders
by their inodes. Names prove nothing, because in a container a process may have the pid and the start time of
an earlier one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from celery_dq.per_process import PerProcess
from celery_dq.private_files import open_folder

__all__ = ["LOCK", "OPEN", "FolderLock", "lock_file"]

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
    def acquire(cls, path: Path, dir_fd: int | None = None) -> FolderLock | None:
        """Lock a folder.

        Args:
            path: The folder.
            dir_fd: Descriptor of the folder above it.

        Returns:
            None when a process holds the lock, which may be this one.

        Raises:
            PermissionError: Another user can change the folder.
            OSError: The folder cannot be opened.
        """
        lock = cls(path, open_folder(path if dir_fd is None else path.name, dir_fd))
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
