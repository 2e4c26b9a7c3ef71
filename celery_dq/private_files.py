"""Files and folders that only this user, or root, can change. Their content is trusted: it is published.

Each check is of the opened descriptor, so that the name cannot stand for another file a moment later. Links
are not followed.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["check_parents", "open_folder", "read_file"]

_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_SHARED = stat.S_IWGRP | stat.S_IWOTH


def open_folder(path: Path | str, dir_fd: int | None = None, *, is_trusted: bool = True) -> int:
    """Open a folder.

    Args:
        path: The folder; relative to `dir_fd`, if that is given.
        dir_fd: Descriptor of the folder above it.
        is_trusted: Whether no other user may be able to change the folder.

    Raises:
        PermissionError: Another user owns it, or can change it. The text has the remedy.
        OSError: It is missing, a link, or not a folder.
    """
    fd = os.open(path, _OPEN | os.O_DIRECTORY, dir_fd=dir_fd)
    try:
        if is_trusted:
            _refuse_foreign(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_file(
    path: Path | str, dir_fd: int | None = None, *, limit: int = -1, is_trusted: bool = True
) -> bytes:
    """Return the content of a file.

    Args:
        path: The file; relative to `dir_fd`, if that is given.
        dir_fd: Descriptor of its folder.
        limit: Number of bytes to read; -1 reads all.
        is_trusted: Whether no other user may be able to change the file.

    Raises:
        PermissionError: It is not a file, or another user owns it or can change it.
        OSError: It is missing or a link, or cannot be read.
    """
    # Not blocking, because a pipe would wait for its writer.
    with os.fdopen(os.open(path, _OPEN | os.O_NONBLOCK, dir_fd=dir_fd), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError(0, f"{path} is not a file: remove it")
        if is_trusted:
            _refuse_foreign(path, status)
        return file.read(limit)


def check_parents(folder: Path) -> None:
    """Check that no other user can replace a folder.

    Raises:
        PermissionError: Another user owns the folder above it, or can replace a folder above it.
        OSError: A folder above is missing.
    """
    for number, parent in enumerate(folder.absolute().parents):
        status = parent.stat()
        if status.st_mode & stat.S_ISVTX:
            continue  # as in /tmp, only the owner of an entry may replace it
        if number == 0:
            _refuse_foreign(parent, status)
        elif status.st_mode & stat.S_IWOTH:
            _refuse_shared(parent, status)


def _refuse_foreign(path: Path | str, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(
            0,
            f"{path} belongs to user id {status.st_uid}, and this process has user id {os.geteuid()}: run it "
            "as that user, or use a folder of its own",
        )
    if status.st_mode & _SHARED:
        _refuse_shared(path, status)


def _refuse_shared(path: Path | str, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    raise PermissionError(
        0,
        f"other users may write to {path} (mode {mode:o}): chmod go-w, or chmod +t and use a folder below it",
    )
