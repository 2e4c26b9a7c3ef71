"""Quotas that hold for many tenants at once: the one from the settings, and what a change of them entails."""

from __future__ import annotations

from typing import Any

from celery_dq.keys import CONFIG_QUOTA
from celery_dq.options.quota import UNLIMITED, Quota
from celery_dq.transport.redis.partition import MAX_CHUNK, Partition

#: Tenants that one scan looks at, roughly.
SCAN_COUNT = 500


def bring_settings(partition: Partition, client: Any, quota: Quota) -> None:
    """Make the settings' quota hold in a partition, for its backlog too.

    A worker does this when it begins to consume, so among workers whose settings differ the last
    one's hold. A producer does not: it need not know the quotas.

    Arguments:
        partition: What is about to be consumed.
        client: A redis client.
        quota: Of every tenant that has none of its own, as ``dq_queues`` and ``dq_default_quota`` say.
    """
    packed = None if quota == UNLIMITED else quota.pack()
    if client.hget(partition.keys.quotas, CONFIG_QUOTA) != packed:
        partition.set_shared_quota("config", packed).run(client)
        place_held_back(partition, client)


def place_held_back(partition: Partition, client: Any) -> None:
    """Decide anew about every tenant that is held back, in chunks.

    An eligible one needs no such call: it is decided when its turn comes.
    """
    keys = partition.keys
    for key in (keys.throttled, keys.limited, keys.parked):
        cursor = 0
        while True:
            cursor, found = client.zscan(key, cursor, count=SCAN_COUNT)
            for start in range(0, len(found), MAX_CHUNK):
                tenants = [
                    member.decode("utf-8", "surrogateescape")
                    for member, _ in found[start : start + MAX_CHUNK]
                ]
                partition.place(tenants).run(client)
            if not int(cursor):
                break
