"""Functions that make the disk write files and folder entries."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["make_folder", "sync_data", "sync_folder"]

sync_data = os.fdatasync if sys.platform == "linux" else os.fsync


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
