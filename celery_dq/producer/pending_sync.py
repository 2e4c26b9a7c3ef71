"""A file of the spill log that waits for its sync, which runs without the lock of the message store."""

from __future__ import annotations

import errno
import os

from celery_dq.producer.fsync import sync_data, sync_folder
from celery_dq.producer.spill_log import Segment

__all__ = ["PendingSync"]


class PendingSync:
    """A file to sync. Other threads may append to it, seal it or remove it meanwhile.

    Args:
        producer: Producer sequence that the file belongs to.
        segment: The file.
    """

    def __init__(self, producer: bytes, segment: Segment) -> None:
        self.producer = producer
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
