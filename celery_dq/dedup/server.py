"""Where claims are kept for a broker that gives no verdicts: a Redis that the app's settings name."""

from __future__ import annotations

from typing import Any

import redis

from celery_dq.dedup.redis import RedisCoordinator, load_scripts
from celery_dq.errors import ConfigurationError
from celery_dq.keys import ClaimKeys
from celery_dq.options.sections import Options

__all__ = ["OwnRedis", "redis_of"]

#: Seconds that a Redis may take to answer.
SOCKET_TIMEOUT = 15.0


class OwnRedis(RedisCoordinator):
    """A coordinator with a client of its own.

    Arguments:
        url: of the Redis.
        options: the app's.
        owner: see :class:`RedisCoordinator`.
    """

    def __init__(self, url: str, options: Options, owner: str) -> None:
        self._url = url
        keys = ClaimKeys(options.environment, options.key_prefix)
        super().__init__(self.new_client(), keys, load_scripts(), owner=owner, lease=options.lease_us / 1e6)

    def new_client(self) -> Any:
        """Make another client of the same server."""
        return redis.Redis.from_url(self._url, socket_timeout=SOCKET_TIMEOUT, socket_keepalive=True)

    def close(self) -> None:
        """Close its connections."""
        self._client.close()


def redis_of(app: Any, options: Options) -> str:
    """Return the URL of the Redis that keeps the claims of an app.

    Raises:
        ConfigurationError: There is none: set ``dq_dedup_url``.
    """
    broker = str(app.conf.broker_read_url or app.conf.broker_url or "")
    for url in (options.dedup_url, broker, str(app.conf.result_backend or "")):
        if url.startswith(("redis://", "rediss://", "unix://")):
            return url
    raise ConfigurationError(
        f"tasks of this app take part in dedup, and neither the broker ({broker.partition('://')[0]}) nor "
        "the result backend is a Redis: set dq_dedup_url to the Redis that is to keep the claims"
    )
