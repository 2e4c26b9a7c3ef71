"""What a caller may have to handle."""

from __future__ import annotations

from kombu.exceptions import OperationalError

from celery_dq.errors import DQError

__all__ = ["BrokerUnavailable", "BufferFull", "NotOnDisk"]


class BrokerUnavailable(DQError, OperationalError):
    """A call that is not buffered was not sent, or nobody knows: the broker did not answer in time.

    Either within ``dq_publish_timeout``, or to the calls before, so that this one did not try.
    """


class BufferFull(DQError, OperationalError):
    """Neither memory nor disk had room for a message within ``dq_buffer_max_block``; it was not accepted."""


class NotOnDisk(DQError, OperationalError):
    """A message that must be on disk before the call returns is not. It is in memory, and may be sent."""
