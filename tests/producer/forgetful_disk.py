"""A disk that loses at a power cut all data without a sync.

The class records each sync of the package and performs it. After a cut a file has the bytes of its last sync,
and a folder the names of its last sync; a removal takes effect at once. This is the worst case of all file
systems.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from celery_dq.producer import spill_log
from celery_dq.producer.spill_log import sync_data


class ForgetfulDisk:
    """The disk below one folder, which itself survives a cut.

    Args:
        base: The folder.
        monkeypatch: The fixture of the test.
    """

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._base = base
        self._names: dict[int, dict[str, int]] = {}
        self._bytes: dict[int, bytes] = {}
        self._fsync = os.fsync
        #: Called before each sync takes effect.
        self.before_sync: Callable[[], None] = lambda: None
        monkeypatch.setattr(os, "fsync", self._sync_folder)
        monkeypatch.setattr(spill_log, "sync_data", self._sync_file)

    def _sync_file(self, fd: int) -> None:
        self.before_sync()
        sync_data(fd)
        seen = os.fstat(fd)
        # The descriptor may be open for writing only.
        self._bytes[seen.st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()

    def _sync_folder(self, fd: int) -> None:
        self.before_sync()
        self._fsync(fd)
        with os.scandir(fd) as entries:
            self._names[os.fstat(fd).st_ino] = {entry.name: entry.inode() for entry in entries}

    def survivors(self) -> dict[Path, bytes]:
        """Return the files, with their bytes, that would survive a power cut now."""
        found: dict[Path, bytes] = {}
        folders = [self._base]
        while folders:
            folder = folders.pop()
            for name, inode in self._names.get(folder.stat().st_ino, {}).items():
                path = folder / name
                if not path.exists() or path.stat().st_ino != inode:
                    continue
                if path.is_dir():
                    folders.append(path)
                else:
                    found[path] = self._bytes.get(inode, b"")
        return found
