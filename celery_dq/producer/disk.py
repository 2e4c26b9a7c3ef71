"""What makes the disk write."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["sync_data", "sync_folder"]

sync_data = os.fdatasync if sys.platform == "linux" else os.fsync


def sync_folder(folder: Path) -> None:
    """Have the disk know the files of a folder, and the folder. Raises OSError."""
    for each in (folder, folder.parent):
        fd = os.open(each, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
