"""Quotas that apply to many tenants: the one of the settings, and the placing of tenants after a change."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from celery_dq.keys import CONFIG_QUOTA, DEFAULT_QUOTA
from celery_dq.options import QueueOptions, Quota
from celery_dq.options.quota import quota_of_bytes
from celery_dq.shown import shell_word, shown_logger
from celery_dq.transport.redis.store.partition import Brought, Partition
from celery_dq.transport.redis.store.rounds import AT_ONCE, Rounds, run_one, run_rounds

logger = shown_logger(__name__)

#: Approximate number of tenants that one round trip places. Redis serves no other client meanwhile.
PLACED_PER_TRIP = 500
#: Partitions that share a round trip.
PLACED_AT_ONCE = 16
#: For how long replaced settings count as older ones, in ms: the longest rolling deployment.
REPLACED_MS = 3_600_000


def write_settings_quota(
    partitions: Sequence[Partition], client: Any, options: QueueOptions, by: str
) -> Rounds[bool]:
    """Apply the quota of a worker's settings to a queue and its backlog, and log the change.

    A worker runs this when it begins to consume. Settings without a quota change nothing. Neither do settings
    that were replaced within the last hour, when a rolling deployment may not be over. Producers need not
    know the quotas and do not run this.

    Args:
        partitions: The partitions that the worker is about to consume.
        client: A redis client.
        options: The quota of ``dq_queues`` and ``dq_default_quota`` for this queue.
        by: The name of the worker.

    Returns:
        False when a partition has another map: call it again with the present partitions.
    """
    queue, quota = partitions[0].keys.queue, options.quota
    if not options.names_quota:
        return True
    # Most workers find their own quota. This read spares them the scripts.
    stored = yield partial(_put_reads, partitions=partitions)
    others = [each for each, (_, config) in zip(partitions, stored, strict=True) if config != quota.pack()]
    brought = (yield from apply_settings(others, client, quota, by)) if others else []
    older = next((each for each in brought if each.status == "older"), None)
    replaced = next((each for each in brought if each.status == "set"), None)
    if older is not None:
        logger.warning(
            "The settings of this worker give the tenants of queue %s the quota %s. It was replaced by "
            "%s, which %s applied and which stays in force: these settings are older. Restart the worker "
            "with the current settings; or, to go back to these, run: celery dq quotas apply %s",
            queue,
            quota,
            unpacked(older.before),
            older.by or "another worker",
            shell_word(queue),
            extra={"event": "older_settings_quota", "queue": queue},
        )
    elif replaced is not None:
        # A first worker only says which quota holds: no worker relied on another one.
        logger.log(
            logging.INFO if replaced.before is None else logging.WARNING,
            "The settings of this worker, %s, change the quota of the tenants of queue %s from %s "
            "(applied by %s) to %s.",
            by,
            queue,
            unpacked(replaced.before),
            replaced.by or "no worker",
            quota,
            extra={"event": "settings_quota_changed", "queue": queue},
        )
    default = next((default for default, _ in stored if default is not None), None)
    if default is not None:
        logger.info(
            "In queue %s the default that was set live, %s, wins over the settings' quota, %s.",
            queue,
            unpacked(default),
            quota,
            extra={"event": "live_default_quota", "queue": queue},
        )
    return all(each.status != "moved" for each in brought)


def apply_settings(
    partitions: Sequence[Partition], client: Any, quota: Quota | None, by: str, *, force: bool = False
) -> Rounds[list[Brought]]:
    """Apply the quota of the settings to a queue and its backlog. A repetition completes an interrupted call.

    Args:
        partitions: The partitions.
        client: A redis client.
        quota: The quota of the settings; None when they have none.
        by: The name of the worker that applies it.
        force: Apply it even when it was replaced within the last hour.

    Returns:
        For each partition, whether it was applied, and the quota before.
    """
    packed = None if quota is None else quota.pack()
    calls = [
        each.bring_settings_quota(packed, by=by, memory_ms=REPLACED_MS, force=force) for each in partitions
    ]
    brought: list[Brought] = yield calls
    changed = [each for each, answer in zip(partitions, brought, strict=True) if answer.status == "set"]
    if changed:
        yield from _place_all_held_back(changed, client)
    return brought


def _put_reads(pipe: Any, *, partitions: Sequence[Partition]) -> None:
    for each in partitions:
        pipe.hmget(each.keys.quotas, DEFAULT_QUOTA, CONFIG_QUOTA)


def unpacked(packed: bytes | None) -> Quota | str:
    """Return a stored quota, or ``"no quota"``."""
    return quota_of_bytes(packed) or "no quota"


def place_held_back(partitions: Sequence[Partition], client: Any) -> None:
    """Place every throttled, limited or paused tenant again, in chunks.

    A tenant in turn needs no such call: a claim applies its quota.
    """
    for start in range(0, len(partitions), AT_ONCE):
        run_one(client, _place_all_held_back(partitions[start : start + AT_ONCE], client))


def _place_all_held_back(partitions: Sequence[Partition], client: Any) -> Rounds[None]:
    counts = yield partial(_put_counts, partitions=partitions)
    numbers = zip(partitions, counts[::3], counts[1::3], counts[2::3], strict=True)
    left = [each for each, *held_back in numbers if any(held_back)]
    at_once = max(min(len(left), PLACED_AT_ONCE), 1)
    most = PLACED_PER_TRIP // at_once
    run_rounds(client, [_place_held_back(each, most) for each in left], at_once=at_once)


def _put_counts(pipe: Any, *, partitions: Sequence[Partition]) -> None:
    for each in partitions:
        for key in (each.keys.throttled, each.keys.at_concurrency, each.keys.paused):
            pipe.zcard(key)


def _place_held_back(partition: Partition, most: int) -> Rounds[None]:
    for place in ("throttled", "at_concurrency", "paused"):
        cursor = None
        while cursor != "0":
            cursor = yield partition.place_held_back(place=place, cursor=cursor or "0", most=most)
