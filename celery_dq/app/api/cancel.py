"""Cancel tasks whose queue or partition is not known, many tasks of one partition, or purge a queue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from celery_dq.app.api.audit import AuditedChange
from celery_dq.app.api.broker import OpenQueue
from celery_dq.app.api.progress import OnProgress
from celery_dq.inspector import messages, tenants
from celery_dq.inspector.redis_values import Client
from celery_dq.transport.redis.store.partition import MAX_CHUNK, Partition
from celery_dq.transport.redis.store.replies import Cancellation
from celery_dq.transport.redis.store.script_batches import run_all, share

__all__ = ["cancel_all_of_tenant", "cancel_everywhere", "cancel_found", "cancellable_of_tenant", "purge_all"]

#: Ids in one call of the ``cancel`` script.
MOST_CANCELLED = 100
#: An outcome of a higher rank says more about a task that several partitions answer for.
_RANKS: tuple[Cancellation, ...] = ("none", "tombstone", "discarded", "delayed", "waiting", "claimed")


def cancel_everywhere(
    queues: Sequence[OpenQueue], task_ids: Sequence[str], tombstone_ttl_ms: int
) -> list[list[Cancellation]]:
    """Cancel tasks in whole queues, in at most two round trips per 100 tasks.

    Each queue that does not have a task gets a tombstone in all of its partitions, because the tenant of a
    task that comes later is not known. Only one partition of a queue has a task, and the other ones get no
    tombstone then.

    Args:
        queues: The queues, which share a client.
        task_ids: The ids of the tasks.
        tombstone_ttl_ms: Life of a tombstone, in milliseconds.

    Returns:
        For each queue, the outcomes in the order of the ids.
    """
    outcomes: list[list[Cancellation]] = [[] for _ in queues]
    for start in range(0, len(task_ids) if queues else 0, MOST_CANCELLED):
        chunk = task_ids[start : start + MOST_CANCELLED]
        for known, found in zip(outcomes, _cancel_chunk(queues, chunk, tombstone_ttl_ms), strict=True):
            known += found
    return outcomes


def _cancel_chunk(queues: Sequence[OpenQueue], ids: Sequence[str], ttl_ms: int) -> list[list[Cancellation]]:
    client = queues[0].client
    # One partition decides alone. Of several, each cancels what it has, and none leaves a tombstone yet.
    asked = [(queue, each) for queue in range(len(queues)) for each in queues[queue].partitions]
    first = [0 if len(queues[queue].partitions) > 1 else ttl_ms for queue, _ in asked]
    calls = [each.cancel(ids, tombstone_ttl_ms=ttl) for (_, each), ttl in zip(asked, first, strict=True)]
    replies = run_all(calls, client)
    outcomes: list[list[Cancellation]] = [["none"] * len(ids) for _ in queues]
    places: dict[tuple[int, int], Partition] = {}
    for (queue, partition), reply in zip(asked, replies, strict=True):
        for place, outcome in enumerate(reply):
            if _RANKS.index(outcome) > _RANKS.index(outcomes[queue][place]):
                outcomes[queue][place] = outcome
                places[queue, place] = partition
    again = _tombstones(queues, outcomes, places)
    calls = [
        partition.cancel([ids[place] for place in own], tombstone_ttl_ms=ttl_ms)
        for (_, partition), own in again.items()
    ]
    replies = run_all(calls, client)
    for ((queue, _), own), reply in zip(again.items(), replies, strict=True):
        for place, outcome in zip(own, reply, strict=True):
            # A message may have been published since the first look.
            if _RANKS.index(outcome) > _RANKS.index(outcomes[queue][place]):
                outcomes[queue][place] = outcome
    return outcomes


def _tombstones(
    queues: Sequence[OpenQueue],
    outcomes: Sequence[Sequence[Cancellation]],
    places: dict[tuple[int, int], Partition],
) -> dict[tuple[int, Partition], list[int]]:
    """Return the partitions that get tombstones: queue and partition -> places of the ids.

    A claimed task gets one in its partition, so that it does not run again. An unknown one gets one in all.
    So does a claimed one while tenants move: its message may be on its way to another partition.
    """
    wanted: dict[tuple[int, Partition], list[int]] = {}
    for number, queue in enumerate(queues):
        if len(queue.partitions) == 1:
            continue
        for place, outcome in enumerate(outcomes[number]):
            if outcome == "claimed" and queue.homes.before is None:
                wanted.setdefault((number, places[number, place]), []).append(place)
            elif outcome in ("none", "claimed"):
                for partition in queue.partitions:
                    wanted.setdefault((number, partition), []).append(place)
    return wanted


def cancel_found(
    partition: Partition,
    client: Client,
    chunks: Iterable[list[str]],
    change: AuditedChange,
    on_progress: OnProgress,
) -> None:
    """Cancel the tasks in `chunks`, which were found in a partition, and count them."""
    for found in chunks:
        chunk = list(dict.fromkeys(found))
        for start in range(0, len(chunk), MOST_CANCELLED):
            call = partition.cancel(chunk[start : start + MOST_CANCELLED], tombstone_ttl_ms=0)
            outcomes = call.run(client)
            change.count += sum(outcome in ("waiting", "delayed") for outcome in outcomes)
            on_progress(change.count)


def cancellable_of_tenant(partition: Partition, client: Client, tenant: str) -> int:
    """Return the number of a tenant's waiting and delayed messages in a partition."""
    delayed = messages.delayed_ids_of_tenant(partition, client, tenant)
    return tenants.tenant_snapshot(partition, client, tenant).waiting + sum(map(len, delayed))


def cancel_all_of_tenant(
    partition: Partition, client: Client, tenant: str, change: AuditedChange, on_progress: OnProgress
) -> None:
    """Cancel a tenant's waiting and delayed messages in a partition, and count them."""
    delayed = messages.delayed_ids_of_tenant(partition, client, tenant)
    remaining = 1
    while remaining:
        moved, remaining = partition.cancel_tenant(tenant).run(client)
        change.count += moved
        on_progress(change.count)
        if not moved:
            break
    cancel_found(partition, client, delayed, change, on_progress)


def purge_all(
    partitions: Sequence[Partition], client: Client, change: AuditedChange, on_progress: OnProgress
) -> None:
    """Remove all waiting and delayed messages and discards of a queue, and count them in `change`."""
    left = list(partitions)
    while left:
        limit = share(MAX_CHUNK, len(left))
        replies = run_all([partition.purge(limit=limit) for partition in left], client)
        change.count += sum(reply.removed for reply in replies)
        on_progress(change.count)
        left = [
            partition for partition, reply in zip(left, replies, strict=True) if reply.more and reply.removed
        ]
