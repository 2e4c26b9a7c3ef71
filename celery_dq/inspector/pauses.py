"""Pauses of tenants and of whole queues, with their ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from celery_dq.inspector.redis_values import Client, chunks, moment, number, scan_all, server_time_us, text
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.rounds import Rounds, run_rounds

__all__ = ["PAUSE_FIELDS", "Pause", "pause_of", "pause_of_all", "paused_tenants", "queue_pause"]

#: The fields of the hash ``state`` that :func:`pause_of` reads.
PAUSE_FIELDS = ("paused_since", "paused_until")
#: The end of a pause that does not end by itself, µs; ``include/wake.lua`` has the same.
WITHOUT_END_US = 9e15


@dataclass(frozen=True)
class Pause:
    """A pause of a tenant or of a whole queue.

    Attributes:
        since: When it began.
        until: When it ends by itself; None when only a call ends it.
    """

    since: datetime | None
    until: datetime | None = None

    def __str__(self) -> str:
        """Return a phrase for a table: its end, or without one its begin."""
        if self.until is not None:
            return f"until {self.until.isoformat(timespec='seconds')}"
        return "without end" if self.since is None else f"since {self.since.isoformat(timespec='seconds')}"


def pause_of(since_us: float, until_us: float, now_us: float) -> Pause | None:
    """Return a pause from its times in µs; None when it is over. An end of 0 or `WITHOUT_END_US` is none."""
    if 0 < until_us <= now_us:
        return None
    return Pause(moment(since_us), None if until_us >= WITHOUT_END_US else moment(until_us))


def pause_of_all(pauses: Sequence[Pause | None]) -> Pause | None:
    """Return when all partitions of a queue are paused, from their pauses; None when one of them is not."""
    since: list[datetime] = []
    until: list[datetime] = []
    for pause in pauses:
        if pause is None:
            return None
        since += [] if pause.since is None else [pause.since]
        until += [] if pause.until is None else [pause.until]
    return Pause(max(since, default=None), min(until, default=None))


def queue_pause(partition: Partition, client: Client) -> Pause | None:
    """Return the pause of the whole queue in a partition; None when it is not paused."""
    return read_queue_pause(client.hmget(partition.keys.state, PAUSE_FIELDS), server_time_us(client))


def read_queue_pause(fields: list[Any], now_us: float) -> Pause | None:
    """Return the pause of a queue from the values of `PAUSE_FIELDS`."""
    since, until = (number(each) for each in fields)
    return pause_of(since, until, now_us) if until else None


def paused_tenants(partitions: Sequence[Partition], client: Client) -> dict[str, Pause]:
    """Return the tenants that were paused by a call, the earliest pause first. Read in chunks."""
    now = server_time_us(client)
    found = [row for rows in run_rounds(client, [_pauses_in(each) for each in partitions]) for row in rows]
    pauses = {name: pause_of(since, until, now) for since, name, until in sorted(found)}
    return {name: pause for name, pause in pauses.items() if pause is not None}


def _pauses_in(partition: Partition) -> Rounds[list[tuple[float, str, float]]]:
    """Return begin (µs), tenant and end (µs, 0 for none) of the pauses of tenants."""
    since = yield from scan_all("zset", partition.keys.pauses)
    found = []
    for names in chunks(list(since)):
        (ends,) = yield partial(_put_ends, key=partition.keys.pause_ends, names=names)
        found += [(since[name], text(name), end or 0) for name, end in zip(names, ends, strict=True)]
    return found


def _put_ends(pipe: Any, *, key: str, names: Sequence[bytes]) -> None:
    pipe.zmscore(key, list(names))
