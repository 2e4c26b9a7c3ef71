"""The backlogs of the tenants of a queue, and how many of its messages may start now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from typing import Any, NamedTuple

from celery_dq.inspector.queue_counters import MOST_TENANTS, PLACES, TENANTS_PER_TRIP, oldest_waiting_of
from celery_dq.inspector.redis_values import Client, number
from celery_dq.inspector.tenants import BACKLOG_STATES, TenantState
from celery_dq.transport.redis.store.partition import TENANTS_PER_COUNT, Partition
from celery_dq.transport.redis.store.rounds import Rounds, run_chosen, run_rounds

#: Tenants that one call counts to find the largest backlogs; those behind are not looked at.
MOST_COUNTED = 100_000
#: Fewest tenants that one script counts, when those of many partitions share a round trip.
FEWEST_PER_COUNT = 50
_STATES: dict[str, TenantState] = dict(zip(PLACES, BACKLOG_STATES, strict=True))


@dataclass(frozen=True)
class TenantBacklog:
    """The backlog of one tenant.

    Attributes:
        queue: Name of the queue.
        tenant: Name of the tenant.
        state: Its state; None of several tenants together.
        waiting: Number of its waiting messages, without delayed ones.
        oldest_waiting_s: How long its oldest waiting message has waited, in seconds; None without one.
    """

    queue: str
    tenant: str
    state: TenantState | None
    waiting: int
    oldest_waiting_s: float | None

    @property
    def is_throttled(self) -> bool | None:
        """Whether it waits for its rate; None of several tenants together."""
        return None if self.state is None else self.state == "throttled"


@dataclass(frozen=True)
class QueueBacklogs:
    """The backlogs of a queue.

    Attributes:
        runnable: Number of messages that a worker with free slots would get now: discards, and waiting
            messages that the rate and concurrency of their tenants let start. The room of a resource counts
            once for all sets that name it, and again for each 200 further sets. In a pause of the queue only
            discards count. Delayed messages that are due count as one in each partition, because the first
            worker places them. Of more than 4,000 tenants that may be served the others count as one message
            each.
        largest: The tenants with the largest backlogs, the largest first.
    """

    runnable: int
    largest: tuple[TenantBacklog, ...]


class _Head(NamedTuple):
    """The start of a count in one partition.

    Attributes:
        runnable: Discards, and one for delayed messages that are due.
        places: The places whose tenants are to be counted.
        is_paused: Whether the queue is paused.
    """

    runnable: int
    places: tuple[str, ...]
    is_paused: bool


def queue_backlogs(partitions: Sequence[Partition], client: Client, largest: int = 0) -> QueueBacklogs:
    """Count the messages that may start now, and find the largest backlogs.

    Args:
        partitions: The partitions of the queue, which share the round trips.
        client: The client.
        largest: Number of tenants with the largest backlogs. Without any, one round trip per 200 tenants
            that may be served, and at most 21; else one per 200 tenants with a backlog.
    """
    heads = run_rounds(client, [_head(each, largest) for each in partitions])
    runnable = sum(head.runnable for head in heads)
    busy = [(each, head) for each, head in zip(partitions, heads, strict=True) if head.places]
    if not busy:
        return QueueBacklogs(runnable, ())
    most = -(-(MOST_COUNTED if largest else MOST_TENANTS) // len(busy))
    step = min(max(TENANTS_PER_TRIP // len(busy), FEWEST_PER_COUNT), TENANTS_PER_COUNT, most)
    counts = [_count(each, head, largest, most, step) for each, head in busy]
    #: A spread tenant has a backlog in each of its partitions.
    found: dict[str, list[tuple[int, TenantState, Partition]]] = defaultdict(list)
    counted = run_rounds(client, counts, at_once=TENANTS_PER_TRIP // step)
    for (partition, _), (more, backlogs) in zip(busy, counted, strict=True):
        runnable += more
        for tenant, (waiting, state) in backlogs.items():
            found[tenant].append((waiting, state, partition))
    chosen = nlargest(largest, found.items(), key=lambda each: sum(waiting for waiting, _, _ in each[1]))
    places = [(partition, tenant) for tenant, parts in chosen for _, _, partition in parts]
    ages = iter(run_chosen(client, places, oldest_waiting_of))
    return QueueBacklogs(runnable, tuple(_backlog(tenant, parts, ages) for tenant, parts in chosen))


def _backlog(
    tenant: str, parts: Sequence[tuple[int, TenantState, Partition]], ages: Iterator[float | None]
) -> TenantBacklog:
    """Return the backlog of a tenant in all of its partitions; takes an age for each of them."""
    oldest = [age for age in islice(ages, len(parts)) if age is not None]
    _, state, partition = min(parts, key=lambda each: BACKLOG_STATES.index(each[1]))
    waiting = sum(each for each, _, _ in parts)
    return TenantBacklog(partition.keys.queue, tenant, state, waiting, max(oldest, default=None))


def _head(partition: Partition, largest: int) -> Rounds[_Head]:
    keys = partition.keys

    def read(pipe: Any) -> None:
        pipe.time()
        pipe.hmget(keys.state, "paused_until", "resume_at")
        pipe.zcard(keys.discards)
        pipe.zrange(keys.delayed, 0, 0, withscores=True)
        for place in _STATES:
            pipe.exists(getattr(keys, place))

    (seconds, micros), (paused_until, resume_at), discards, first, *there = yield read
    now = int(seconds) * 1_000_000 + int(micros)
    is_paused = number(paused_until) > now
    is_due = not is_paused and any(due <= now for _, due in first)
    # A tenant whose pause is over by the clock stays among the paused ones until a worker looks.
    has_resumed = 0 < number(resume_at) <= now
    wanted = (not is_paused, not is_paused, not is_paused, False, has_resumed and not is_paused)
    places = [
        place
        for place, exists, is_wanted in zip(_STATES, there, wanted, strict=True)
        if exists and (largest or is_wanted)
    ]
    return _Head(int(discards) + int(is_due), tuple(places), is_paused)


def _count(
    partition: Partition, head: _Head, largest: int, most: int, step: int
) -> Rounds[tuple[int, dict[str, tuple[int, TenantState]]]]:
    """Return the number of runnable messages, and the largest backlogs by tenant, in one partition."""
    runnable = 0
    found: dict[str, tuple[int, TenantState]] = {}
    for place in head.places:
        state = _STATES[place]
        seen = size = 0
        while seen < most:
            page = yield partition.backlogs(place, seen, largest, most=step)
            runnable += page.runnable
            seen, size = seen + page.tenants, page.size
            found.update((tenant, (waiting, state)) for tenant, waiting in page.largest)
            if len(found) > 10 * largest:
                found = dict(nlargest(largest, found.items(), key=lambda each: each[1][0]))
            # Throttled tenants are in the order of their next allowed time.
            if page.tenants < step or (place == "throttled" and not largest and not page.runnable):
                break
        if place == "turn" and not head.is_paused:
            runnable += max(size - seen, 0)
    return runnable, found
