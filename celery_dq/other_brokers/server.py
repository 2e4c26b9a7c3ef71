"""The Redis that keeps the dedup locks of a broker that gives no verdicts; the app's settings name it."""

from __future__ import annotations

from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_dq.errors import ConfigurationError
from celery_dq.keys import DedupKeys
from celery_dq.options.resolve import REDIS_URLS
from celery_dq.options.schema import refuse_unreadable_url
from celery_dq.options.sections import Options
from celery_dq.other_brokers.redis_coordinator import RedisCoordinator, load_scripts
from celery_dq.shown import shown_url

__all__ = ["OwnRedis", "redis_of"]

#: The time limit of an answer, as a share of the lease. A worker waits that long once per outage.
PATIENCE = 1 / 3


class OwnRedis(RedisCoordinator):
    """A coordinator with a client of its own.

    Args:
        url: the URL of the Redis.
        options: the settings of the app.
        owner: see :class:`RedisCoordinator`.
    """

    def __init__(self, url: str, options: Options, owner: str) -> None:
        self._url = url
        lease_s = options.lease_us / 1e6
        self._patience_s = lease_s * PATIENCE
        keys = DedupKeys(options.environment, options.key_prefix)
        super().__init__(self.new_client(), keys, load_scripts(), owner=owner, lease=lease_s)

    def new_client(self) -> Any:
        """Make another client of the same server.

        It reconnects at once, and only once, because pauses between attempts would stop the event loop.
        """
        return redis.Redis.from_url(
            self._url,
            socket_timeout=self._patience_s,
            socket_connect_timeout=self._patience_s,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 1, (redis.ConnectionError,)),
        )

    def close(self) -> None:
        """Close its connections."""
        self._client.close()


def redis_of(app: Any, options: Options) -> str:
    """Return the URL of the Redis that keeps the dedup locks of an app.

    Raises:
        ConfigurationError: No setting names a Redis.
    """
    broker = str(app.conf.broker_read_url or app.conf.broker_url or "")
    urls = {"dq_dedup_url": options.dedup_url, "broker_url": broker}
    for name, url in {**urls, "result_backend": str(app.conf.result_backend or "")}.items():
        if url.startswith(REDIS_URLS):
            refuse_unreadable_url(name, url)
            return url
    raise ConfigurationError(
        f"tasks of this app take part in dedup, and neither the broker ({shown_url(broker)}) nor "
        "the result backend is a Redis: set dq_dedup_url to the Redis that is to keep the dedup locks"
    )
