"""Errors of the buffered producer that a caller may have to handle."""

from __future__ import annotations

from kombu.exceptions import OperationalError

from celery_dq.errors import DQError

__all__ = ["BrokerUnavailable", "BufferFull", "NotOnDisk"]


class BrokerUnavailable(DQError, OperationalError):
    """A call that is not buffered was not sent, or its outcome is unknown.

    Either the broker did not answer within ``dq_publish_timeout``, or the circuit breaker is open after such
    failures and the call was not tried.
    """


class BufferFull(DQError, OperationalError):
    """Memory and disk had no room for a message within ``dq_buffer_max_block``; it was not accepted."""


class NotOnDisk(DQError, OperationalError):
    """As many messages as ``dq_buffer_sync_every`` could not be written to disk. They may be sent."""
