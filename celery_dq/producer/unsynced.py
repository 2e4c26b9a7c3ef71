"""A file of the spill log on its way to the disk, away from the lock of the outbox."""

from __future__ import annotations

import errno
import os

from celery_dq.producer.disk import sync_data, sync_folder
from celery_dq.producer.spill_log import Segment

__all__ = ["Unsynced"]


class Unsynced:
    """A file to be synced while others append to it, seal it, or remove it.

    :param producer: whose it is.
    """

    def __init__(self, producer: bytes, segment: Segment) -> None:
        self.producer = producer
        self.segment = segment
        self._size = segment.size
        self._first = not segment.synced
        # A descriptor of our own: the segment's may be closed, and its number be given to another file.
        # Who was sealed has none, and comes here only when it is poisoned.
        self._fd = os.dup(segment.fd) if segment.fd >= 0 else -1

    def sync(self) -> None:
        """Have the disk write it. Raises OSError, from then on every time: the kernel tells it only once."""
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
