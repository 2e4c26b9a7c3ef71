"""Who has a folder of the spill log.

The lock is POSIX (``lockf``): it ends with the process, however that ends, and a forked child does not
inherit it. It also ends when the process closes *any* descriptor of the file, and it keeps out other
processes only. So a process never opens the lock file of a folder of its own; the folder's name tells. Nor
that of a folder that it has adopted, for another app maybe: a file in there that is named for it tells.
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
    """Lock the file, and return its descriptor; None when somebody else has it, or it is gone."""
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
    """Whether somebody in this process has adopted the folder."""
    return os.path.lexists(os.path.join(folder, process + _MARK))


def mark(folder: Path, process: str) -> bool:
    """Say that this process has adopted the folder, which it has locked; False where it said so already.

    The descriptor of the lock must then be left open: another thread was faster, and the lock is now its.
    """
    try:
        os.close(os.open(folder / f"{process}{_MARK}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN, 0o600))
    except FileExistsError:
        return False
    except OSError:
        pass  # the disk is full: what lies in the folder must be sent all the more
    return True


def unlock_orphan(folder: Path, process: str, lock: int) -> None:
    """Let an adopted folder go."""
    # In this order: as long as it is marked nobody else in this process has a lock there that he could lose.
    with contextlib.suppress(OSError):
        os.close(lock)
    with contextlib.suppress(OSError):
        os.unlink(folder / f"{process}{_MARK}")
