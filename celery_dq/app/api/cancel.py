"""Cancel tasks whose queue or partition is not known, or many tasks of one partition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from celery_dq.app.api.audit import AuditedChange
from celery_dq.app.api.broker import OpenQueue
from celery_dq.inspector import messages, tenants
from celery_dq.inspector.redis_values import Client
from celery_dq.transport.redis.store.partition import Cancellation, Partition
from celery_dq.transport.redis.store.script_calls import run_all

#: Ids in one call of the ``cancel`` script.
MOST_CANCELLED = 100
#: An outcome of a higher rank says more about a task that several partitions answer for.
_RANKS: tuple[Cancellation, ...] = ("none", "tombstone", "discarded", "delayed", "waiting", "claimed")


def cancel_everywhere(
    queues: Sequence[OpenQueue], task_ids: Sequence[str], tombstone_ttl_ms: int
) -> list[list[Cancellation]]:
    """Cancel tasks in whole queues, in at most two round trips per 100 tasks.

    A task is looked for where its id says that it is, in each queue. Only a message that waited there ends
    the search. An in-flight one may have another waiting message with its id, of another tenant. The
    partitions that were asked get a tombstone, except those of a queue in which a message waited there.

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
        cancelled = _CancelledTasks(queues, chunk, tombstone_ttl_ms)
        cancelled.look_first()
        cancelled.leave_tombstones()
        for known, found in zip(outcomes, cancelled.outcomes, strict=True):
            known += found
    return outcomes


class _CancelledTasks:
    """Some tasks, the partitions that were asked for each of them, and the best outcomes so far.

    Args:
        queues: The queues, which share a client.
        ids: The ids of the tasks.
        ttl_ms: Life of a tombstone, in milliseconds.

    Attributes:
        outcomes: For each queue, the outcomes in the order of the ids.
    """

    def __init__(self, queues: Sequence[OpenQueue], ids: Sequence[str], ttl_ms: int) -> None:
        self._queues = queues
        self._ids = ids
        self._ttl_ms = ttl_ms
        self.outcomes: list[list[Cancellation]] = [["none"] * len(ids) for _ in queues]
        #: Number of the queue and place of the id -> numbers of the partitions that were asked.
        self._asked: dict[tuple[int, int], set[int]] = {}

    def look_first(self) -> None:
        """Cancel the tasks in the partitions that their ids name; in all, if an id names none."""
        for number, queue in enumerate(self._queues):
            everywhere = set(range(len(queue.partitions)))
            for place, task_id in enumerate(self._ids):
                self._asked[number, place] = queue.homes.likely(task_id) or everywhere
        # One partition decides alone. Of several, each cancels what it has, and none leaves a tombstone yet.
        self._cancel(self._asked, lambda queue: 0 if len(queue.partitions) > 1 else self._ttl_ms)

    def leave_tombstones(self) -> None:
        """Look in all other partitions for tasks of which no message waited, and leave tombstones.

        An unknown task may be published later. A claimed one may come back, or its retry may name another
        tenant, so that its messages may come to any partition.
        """
        waited = [
            any(outcomes[place] in ("waiting", "delayed") for outcomes in self.outcomes)
            for place in range(len(self._ids))
        ]
        wanted: dict[tuple[int, int], set[int]] = {}
        for (number, place), asked in self._asked.items():
            count = len(self._queues[number].partitions)
            others = set() if waited[place] else set(range(count)) - asked
            # A message may have been published there since the first look, and is cancelled now.
            again = count > 1 and self.outcomes[number][place] in ("none", "claimed")
            wanted[number, place] = others | asked if again else others
        self._cancel(wanted, lambda _: self._ttl_ms)

    def _cancel(
        self, wanted: Mapping[tuple[int, int], Iterable[int]], ttl_ms_of: Callable[[OpenQueue], int]
    ) -> None:
        """Run the script for tasks in some partitions, and note the outcomes that say more."""
        places: dict[tuple[int, int], list[int]] = {}
        for (number, place), partitions in wanted.items():
            for partition in partitions:
                places.setdefault((number, partition), []).append(place)
        calls = [
            self._queues[number]
            .partitions[partition]
            .cancel([self._ids[place] for place in own], tombstone_ttl_ms=ttl_ms_of(self._queues[number]))
            for (number, partition), own in places.items()
        ]
        replies = run_all(calls, self._queues[0].client)
        for ((number, _), own), reply in zip(places.items(), replies, strict=True):
            known = self.outcomes[number]
            for place, outcome in zip(own, reply, strict=True):
                if _RANKS.index(outcome) > _RANKS.index(known[place]):
                    known[place] = outcome


def cancel_found(
    partition: Partition, client: Client, chunks: Iterable[list[str]], change: AuditedChange
) -> None:
    """Cancel the tasks in `chunks`, which were found in a partition, and count them."""
    for found in chunks:
        chunk = list(dict.fromkeys(found))
        for start in range(0, len(chunk), MOST_CANCELLED):
            call = partition.cancel(chunk[start : start + MOST_CANCELLED], tombstone_ttl_ms=0)
            outcomes = call.run(client)
            change.add(sum(outcome in ("waiting", "delayed") for outcome in outcomes))


def cancellable_of_tenant(partition: Partition, client: Client, tenant: str) -> int:
    """Return the number of a tenant's messages in a partition that no worker has."""
    unlisted = messages.unlisted_ids_of_tenant(partition, client, tenant)
    return tenants.tenant_snapshot(partition, client, tenant).waiting + sum(map(len, unlisted))


def cancel_all_of_tenant(partition: Partition, client: Client, tenant: str, change: AuditedChange) -> None:
    """Cancel a tenant's messages in a partition that no worker has, and count them."""
    # One that becomes due, or gets its dedup lock, goes to the tenant's own list, which is emptied last.
    cancel_found(partition, client, messages.unlisted_ids_of_tenant(partition, client, tenant), change)
    remaining = 1
    while remaining:
        moved, remaining = partition.cancel_tenant(tenant).run(client)
        change.add(moved)
        if not moved:
            break
