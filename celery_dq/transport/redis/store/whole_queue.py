"""Reads and calls on many partitions in few round trips, and which of them a look by a task id asks first."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import redis

from celery_dq.transport.redis.store.full_server import read_together
from celery_dq.transport.redis.store.partition import (
    MAX_CHUNK,
    Partition,
    PartitionedQueue,
    Queue,
    read_text,
)
from celery_dq.transport.redis.store.script_calls import chunks, run_all, share


def waiting_count(queue: PartitionedQueue, client: Any) -> int:
    """Return how many messages wait. Messages in flight, delayed or cancelled do not count."""
    calls = [each.partition.depth() for each in queue.partitions]
    answers = iter(read_together(client, [command for call in calls for command in call.commands]))
    return sum(call.parse([next(answers) for _ in call.commands]) for call in calls)


def purge(partitions: Sequence[Partition], client: Any) -> Iterator[int]:
    """Remove the waiting and delayed messages and the discards; yield how many each step has removed."""
    left = list(partitions)
    while left:
        purged = run_all([each.purge(limit=share(MAX_CHUNK, len(left))) for each in left], client)
        yield sum(each.removed for each in purged)
        left = [each for each, reply in zip(left, purged, strict=True) if reply.more and reply.removed]


def former_homes(partitions: Sequence[Partition]) -> Sequence[Partition]:
    """Return the partitions out of which tenants move; none without a change.

    A call that removes messages empties them first. Then it finds all that have moved in the other ones.
    """
    return partitions[: partitions[0].homes.before or 0]


def namesake_of(name: str, count: int, registry: str, client: Any) -> str | None:
    """Return the name of a queue that would be the name of a partition; None without one.

    Args:
        name: Name of the queue that gets partitions.
        count: Their number.
        registry: Key of the names of all queues.
        client: A redis client.
    """
    numbers = {f"{name}/{number}" for number in range(count)}
    members = {each.decode() if isinstance(each, bytes) else each for each in client.smembers(registry)}
    return min(numbers & members, default=None)


def with_messages(queue: PartitionedQueue, client: Any) -> list[Queue]:
    """Return the partitions that hold messages, in random order, so that none waits for others."""
    with client.pipeline(transaction=False) as pipe:
        for each in queue.partitions:
            pipe.hlen(each.partition.keys.messages)
        counts = pipe.execute()
    found = [each for each, count in zip(queue.partitions, counts, strict=True) if count]
    random.shuffle(found)
    return found


def is_current(queue: PartitionedQueue, client: Any) -> bool:
    """Return whether the broker still has this map of a queue."""
    stored = client.hget(queue.partitions[0].partition.keys.state, "partitions")
    return read_text(stored or "1") == queue.homes.text


def likely_first(partitions: Sequence[Partition], task_id: str) -> tuple[list[Partition], list[Partition]]:
    """Divide partitions into those in which the id says that the task is, and the other ones.

    Args:
        partitions: The partitions of one queue or of several.
        task_id: The id of the task. If it names no tenant, all partitions come first.
    """
    likely: dict[str, set[int]] = {}
    first: list[Partition] = []
    others: list[Partition] = []
    for partition in partitions:
        queue = partition.keys.queue
        if queue not in likely:
            likely[queue] = partition.homes.likely(task_id)
        numbers = likely[queue]
        (first if not numbers or partition.keys.partition in numbers else others).append(partition)
    return first, others


def is_wakeup_stored(queues: Sequence[Queue], client: redis.Redis) -> bool:
    """Return whether a wake-up of one of these queues is stored that no consumer has taken."""
    for chunk in chunks(queues):
        with client.pipeline(transaction=False) as pipe:
            for queue in chunk:
                pipe.llen(queue.partition.keys.wake)
            if any(pipe.execute()):
                return True
    return False


def held_counts(queues: Sequence[Queue], consumer: str, client: redis.Redis) -> list[Any]:
    """Return how many messages of each of these queues the broker has for a consumer, in one round trip.

    Each answer may be an exception.
    """
    with client.pipeline(transaction=False) as pipe:
        for queue in queues:
            pipe.hlen(queue.partition.keys.held(queue.consumer(consumer)))
        return list(pipe.execute(raise_on_error=False))
