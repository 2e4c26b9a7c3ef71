"""The lock that shows which process owns a folder of the spill log.

The lock is a POSIX lock (``lockf``). It ends with the process in every case, and a forked child does not
inherit it. It also ends when the process closes *any* descriptor of the file, and it excludes other processes
only.

A process must therefore never open the lock file of a folder that it owns. Its own folders carry its name. In
an adopted folder, which another app of the process may have adopted, a marker file carries its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

__all__ = ["LOCK", "OPEN", "is_marked", "lock_file", "mark", "unlock_orphan"]

LOCK = "lock"
OPEN = os.O_CLOEXEC | os.O_NOFOLLOW
_MARK = ".adopter"


def lock_file(path: Path, *, create: bool) -> int | None:
    """Lock a file.

    Returns:
        The descriptor of the file; None when another process holds the lock, or the file is gone.
    """
    try:
        fd = os.open(path, os.O_RDWR | OPEN | (os.O_CREAT if create else 0), 0o600)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
            return fd
    os.close(fd)
    return None


def is_marked(folder: str, process: str) -> bool:
    """Return whether this process has adopted the folder."""
    return os.path.lexists(os.path.join(folder, process + _MARK))


def mark(folder: Path, process: str) -> bool:
    """Mark a folder, which this process has locked, as adopted by this process.

    Returns:
        False when the folder is marked already, because another thread was faster. The lock now belongs to
        that thread, so the caller must leave the descriptor open.
    """
    try:
        os.close(os.open(folder / f"{process}{_MARK}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN, 0o600))
    except FileExistsError:
        return False
    except OSError:
        pass  # a full disk is no reason to leave the messages: sending them frees space
    return True


def unlock_orphan(folder: Path, process: str, lock: int) -> None:
    """Unlock an adopted folder and remove its marker."""
    # The marker goes last: until then no other thread of this process can take the lock, and lose it here.
    with contextlib.suppress(OSError):
        os.close(lock)
    with contextlib.suppress(OSError):
        os.unlink(folder / f"{process}{_MARK}")
