"""The parts of kombu's Redis transport that this package reuses; see :mod:`celery_dq.transport.bases`."""

from __future__ import annotations

from kombu.transport.redis import (
    Channel as RedisChannel,
    SentinelChannel as RedisSentinelChannel,
    Transport as RedisTransport,
)

__all__ = ["RedisChannel", "RedisSentinelChannel", "RedisTransport"]
