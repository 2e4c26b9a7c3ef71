"""The transport behind Sentinel, consumed by a thread."""

from __future__ import annotations

from celery_dq.transport.redis.sentinel import SentinelChannel, SentinelTransport
from celery_dq.transport.redis.thread_transport import ThreadChannel, ThreadTransport


class SentinelThreadChannel(ThreadChannel, SentinelChannel):
    """A channel whose connections go to the current master."""


class SentinelThreadTransport(ThreadTransport, SentinelTransport):
    """The kombu transport of the tenant broker behind Sentinel."""

    Channel = SentinelThreadChannel
