"""What a caller of the buffer may have to handle."""

from __future__ import annotations

from kombu.exceptions import OperationalError

from celery_dq.errors import DQError

__all__ = ["BufferFull", "NotOnDisk"]


class BufferFull(DQError, OperationalError):
    """Neither memory nor disk had room for a message within ``dq_buffer_max_block``; it was not accepted."""


class NotOnDisk(DQError, OperationalError):
    """A message that must be on disk before the call returns is not. It is in memory, and may be sent."""
