"""The tenants of a queue in parts, for a page that a person turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from celery_dq.errors import InvalidRequest
from celery_dq.inspector.queue_counters import PLACES
from celery_dq.inspector.redis_values import CHUNK, Client, text
from celery_dq.inspector.tenants import (
    BACKLOG_STATES,
    InLine,
    TenantSnapshot,
    TenantState,
    totals,
)
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.rounds import Rounds, run_rounds

#: The states of tenants with a backlog, each with the place of :data:`PLACES` that holds them.
_PLACE_OF: dict[TenantState, str] = dict(zip(BACKLOG_STATES, PLACES, strict=True))
#: Tenants that one call of :func:`tenant_page` may look at.
MOST_LOOKS = 10_000


@dataclass(frozen=True)
class TenantPage:
    """A part of the tenants with a backlog.

    Attributes:
        tenants: Their states: the eligible ones first, partition by partition, in order of service.
        after: The cursor of the next part; "" when there is none.
        looked_at: Number of tenants whose names were compared.
    """

    tenants: tuple[TenantSnapshot, ...]
    after: str
    looked_at: int


def tenant_page(
    partitions: Sequence[Partition],
    client: Client,
    *,
    after: str = "",
    text_in_name: str = "",
    state: TenantState | None = None,
    limit: int = 50,
) -> TenantPage:
    """Read a part of the tenants with a backlog, at a cost that does not depend on their number.

    A search ends after :data:`MOST_LOOKS` names, and the next part continues it. A tenant that changes its
    place between two parts may come twice, or be missed.

    Args:
        partitions: All partitions of the queue.
        client: The client.
        after: The cursor of the part before; "" begins.
        text_in_name: Only tenants whose name contains it, in any case of its letters.
        state: Only tenants in this state.
        limit: Number of tenants, at most.

    Raises:
        InvalidRequest: `after` is not a cursor, or `state` is not the state of a backlog.
    """
    if state is not None and state not in _PLACE_OF:
        raise InvalidRequest(f"state = {state!r}: give one of {', '.join(_PLACE_OF)}")
    lines = [
        _Line(each, number)
        for each in ([state] if state is not None else BACKLOG_STATES)
        for number in range(len(partitions))
    ]
    wanted = text_in_name.casefold()
    found: dict[str, tuple[Partition, InLine]] = {}
    looked_at, cursor = 0, ""
    # One tenant more than the page has shows that another part follows.
    step = CHUNK if wanted else limit + 1
    for line, rank, tenant, score in _ranked(partitions, client, lines, after, step):
        matches = wanted in tenant.casefold()
        if looked_at == MOST_LOOKS or (matches and len(found) == limit):
            cursor = f"{line.state}.{line.number}.{rank}"
            break
        looked_at += 1
        if matches:
            until_us = score if line.state == "throttled" else 0
            found[tenant] = (partitions[line.number], InLine(tenant, line.state, until_us))
    return TenantPage(tuple(totals(partitions, client, list(found.values()))), cursor, looked_at)


@dataclass(frozen=True)
class _Line:
    """The tenants in one state of one partition."""

    state: TenantState
    number: int

    def key(self, partitions: Sequence[Partition]) -> str:
        """Return the sorted set of the tenants."""
        key: str = getattr(partitions[self.number].keys, _PLACE_OF[self.state])
        return key


def _ranked(
    partitions: Sequence[Partition], client: Client, lines: Sequence[_Line], after: str, step: int
) -> Iterator[tuple[_Line, int, str, float]]:
    """Yield line, rank, name and score of the tenants from a cursor on, read in chunks of `step`."""
    first, rank = _begin(lines, after)
    keys = [line.key(partitions) for line in lines]
    sizes = [size for (size,) in run_rounds(client, [_command("zcard", key) for key in keys])]
    # One pipeline reads several short lines, or a chunk of a long one.
    chosen: list[tuple[int, int, int]] = []
    for place in range(first, len(lines)):
        while rank < sizes[place]:
            end = min(rank + step - sum(last - start for _, start, last in chosen), sizes[place])
            chosen.append((place, rank, end))
            rank = end
            if sum(last - start for _, start, last in chosen) == step:
                yield from _read(client, lines, keys, chosen)
                chosen = []
        rank = 0
    yield from _read(client, lines, keys, chosen)


def _read(
    client: Client, lines: Sequence[_Line], keys: Sequence[str], chosen: Sequence[tuple[int, int, int]]
) -> Iterator[tuple[_Line, int, str, float]]:
    ranges = [
        _command("zrange", keys[place], start, end - 1, withscores=True) for place, start, end in chosen
    ]
    for (place, start, _), (rows,) in zip(chosen, run_rounds(client, ranges), strict=True):
        for rank, (member, score) in enumerate(rows, start):
            yield lines[place], rank, text(member), score


def _command(name: str, *args: Any, **options: Any) -> Rounds[list[Any]]:
    answers: list[Any] = yield partial(_put, name=name, args=args, options=options)
    return answers


def _put(pipe: Any, *, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    getattr(pipe, name)(*args, **options)


def _begin(lines: Sequence[_Line], after: str) -> tuple[int, int]:
    """Return the place of the line and the rank in it that a cursor names."""
    if not after:
        return 0, 0
    state, *numbers = after.split(".")
    if len(numbers) == 2 and all(each.isascii() and each.isdecimal() and len(each) < 10 for each in numbers):
        number, rank = map(int, numbers)
        for place, line in enumerate(lines):
            if (line.state, line.number) == (state, number):
                return place, rank
    raise InvalidRequest(f"after = {after!r} is not a cursor of this list: begin without it")
