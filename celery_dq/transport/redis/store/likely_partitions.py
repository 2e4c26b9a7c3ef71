"""The partitions that a look by a task id asks first."""

from __future__ import annotations

from collections.abc import Sequence

from celery_dq.transport.redis.store.partition import Partition


def likely_first(partitions: Sequence[Partition], task_id: str) -> tuple[list[Partition], list[Partition]]:
    """Divide partitions into those in which the id says that the task is, and the other ones.

    Args:
        partitions: The partitions of one queue or of several.
        task_id: The id of the task. If it names no tenant, all partitions come first.
    """
    likely: dict[str, set[int]] = {}
    first: list[Partition] = []
    others: list[Partition] = []
    for each in partitions:
        queue = each.keys.queue
        if queue not in likely:
            likely[queue] = each.homes.likely(task_id)
        numbers = likely[queue]
        (first if not numbers or each.keys.partition in numbers else others).append(each)
    return first, others
