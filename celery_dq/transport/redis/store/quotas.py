"""Quotas that apply to many tenants: the one of the settings, and the placing of tenants after a change."""

from __future__ import annotations

import logging
from typing import Any

from celery_dq.keys import CONFIG_QUOTA, DEFAULT_QUOTA
from celery_dq.options import QueueOptions, Quota
from celery_dq.transport.redis.store.partition import MAX_CHUNK, Partition
from celery_dq.transport.redis.store.replies import Brought

logger = logging.getLogger(__name__)

#: Approximate number of tenants per scan.
SCAN_COUNT = 500
#: For how long replaced settings count as older ones, in ms: the longest rolling deployment.
REPLACED_MS = 3_600_000


def write_settings_quota(partition: Partition, client: Any, options: QueueOptions, by: str) -> None:
    """Apply the quota of a worker's settings to a partition and its backlog, and log the change.

    A worker calls this when it begins to consume. Settings without a quota change nothing. Neither do
    settings that were replaced within the last hour, when a rolling deployment may not be over. Producers
    need not know the quotas and do not call this.

    Args:
        partition: The partition that the worker is about to consume.
        client: A redis client.
        options: The quota of ``dq_queues`` and ``dq_default_quota`` for this queue.
        by: The name of the worker.
    """
    queue, quota = partition.keys.queue, options.quota
    if not options.names_quota:
        return
    # Most workers find their own quota. This read spares them the script.
    default, config = client.hmget(partition.keys.quotas, DEFAULT_QUOTA, CONFIG_QUOTA)
    if config != quota.pack():
        brought = apply_settings(partition, client, quota, by)
        if brought.status == "older":
            logger.warning(
                "The settings of this worker give the tenants of queue %s the quota %s. It was replaced by "
                "%s, which %s applied and which stays in force: these settings are older. Restart the worker "
                "with the current settings; or, to go back to these, run: celery dq quotas apply %s",
                queue,
                quota,
                unpacked(brought.before),
                brought.by or "another worker",
                queue,
                extra={"event": "older_settings_quota", "queue": queue},
            )
        elif brought.status == "set":
            logger.warning(
                "The settings of this worker, %s, change the quota of the tenants of queue %s from %s "
                "(applied by %s) to %s.",
                by,
                queue,
                unpacked(brought.before),
                brought.by or "no worker",
                quota,
                extra={"event": "settings_quota_changed", "queue": queue},
            )
    if default is not None:
        logger.info(
            "In queue %s the default that was set live, %s, wins over the settings' quota, %s.",
            queue,
            Quota.unpack(default),
            quota,
            extra={"event": "live_default_quota", "queue": queue},
        )


def apply_settings(
    partition: Partition, client: Any, quota: Quota | None, by: str, *, force: bool = False
) -> Brought:
    """Apply the quota of the settings to a partition and its backlog.

    Args:
        partition: The partition.
        client: A redis client.
        quota: The quota of the settings; None when they have none.
        by: The name of the worker that applies it.
        force: Apply it even when it was replaced within the last hour.

    Returns:
        Whether it was applied, and the quota before.
    """
    packed = None if quota is None else quota.pack()
    call = partition.bring_settings_quota(packed, by=by, memory_ms=REPLACED_MS, force=force)
    brought = call.run(client)
    if brought.status == "set":
        place_held_back(partition, client)
    return brought


def unpacked(packed: bytes | None) -> Quota | str:
    """Return a stored quota, or ``"no quota"``."""
    return "no quota" if packed is None else Quota.unpack(packed)


def place_held_back(partition: Partition, client: Any) -> None:
    """Place every throttled, limited or paused tenant again, in chunks.

    A tenant in turn needs no such call: a claim applies its quota.
    """
    keys = partition.keys
    for key in (keys.throttled, keys.at_concurrency, keys.paused):
        cursor = 0
        while True:
            cursor, found = client.zscan(key, cursor, count=SCAN_COUNT)
            for start in range(0, len(found), MAX_CHUNK):
                tenants = [
                    member.decode("utf-8", "surrogateescape")
                    for member, _ in found[start : start + MAX_CHUNK]
                ]
                partition.place_held_back(tenants).run(client)
            if not int(cursor):
                break
