"""Pause and resume a tenant or a whole queue."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial

from celery_dq.app.api.audit import AuditedChange
from celery_dq.app.api.broker import BrokerAccess, MapChanged, OpenQueue
from celery_dq.duration import parse_duration
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.queues import Pause, pause_of, pause_of_all
from celery_dq.inspector.redis_values import check_moment, check_seconds, server_time_us
from celery_dq.transport.redis.store.partition import NotPaused, Partition, PauseReply
from celery_dq.transport.redis.store.script_calls import ScriptCall, run_all


def pause(
    broker: BrokerAccess, opened: OpenQueue, tenant: str | None, until: datetime | timedelta | None
) -> Pause:
    """Pause a tenant, or with None the whole queue, and return the pause.

    The pause of a queue ends in all partitions at the same time. A second call completes an interrupted one.

    Args:
        broker: The broker, whose audit stream gets the change.
        opened: The queue.
        tenant: The tenant.
        until: When the pause ends by itself, or after which time from now; None: with :func:`resume`.
            A time without a zone is local time.

    Raises:
        InvalidRequest: The end is over already, by the clock of the server, or is out of range.
    """
    until_us = for_us = 0
    if isinstance(until, timedelta):
        if until <= timedelta(0):
            raise InvalidRequest(f"until = {until}: a pause needs a longer time")
        for_us = parse_duration(until, option="until")
        check_seconds("until", for_us / 1e6)
    elif until is not None:
        until_us = check_moment("until", until, ", or a timedelta")

    def begin(now: OpenQueue, change: AuditedChange) -> list[PauseReply | NotPaused]:
        length, end = for_us, until_us
        if length and len(now.of(tenant)) > 1:
            length, end = 0, server_time_us(now.client) + length
        return _run(now, tenant, change, lambda each: each.pause(tenant, until_us=end, for_us=length))

    details = (
        f"for {until}"
        if isinstance(until, timedelta)
        else "without end"
        if until is None
        else f"until {until}"
    )
    found = None
    audit, client = broker.audit, opened.client
    with audit.change(client, "paused", opened.name, tenant=tenant, details=details) as change:
        answers = broker.repeated(opened, lambda now: begin(now, change))
        replies = [each for each in answers if isinstance(each, PauseReply)]
        if len(replies) == len(answers):
            found = pause_of_all([pause_of(each.since_us, each.until_us, each.since_us) for each in replies])
            change.details = str(found)
    if found is None:
        raise InvalidRequest(
            f"until = {until}: this time is over by the clock of the server; give a later one"
        )
    return found


def resume(broker: BrokerAccess, opened: OpenQueue, tenant: str | None) -> bool:
    """End the pause of a tenant, or with None of the whole queue; return whether there was one."""
    with broker.audit.change(opened.client, "resumed", opened.name, tenant=tenant) as change:
        broker.repeated(opened, lambda now: _run(now, tenant, change, lambda each: each.resume(tenant)))
    return change.count == 1


def extend_pause(broker: BrokerAccess, opened: OpenQueue, tenant: str, for_us: int, cause: str) -> None:
    """Pause a tenant for some time on behalf of a task; a pause that ends later, or never, stays.

    It is not in the audit stream, which has the changes by people and programs.

    Args:
        broker: The broker.
        opened: The queue.
        tenant: The tenant.
        for_us: Time from now until the end of the pause, µs; 0 for no pause.
        cause: The cause that is kept with the pause.
    """
    if for_us:
        pausing = partial(Partition.extend_pause, tenant=tenant, for_us=for_us, cause=cause)
        broker.repeated(opened, lambda now: _run(now, tenant, None, pausing))


def _run(
    opened: OpenQueue,
    tenant: str | None,
    change: AuditedChange | None,
    call: Callable[[Partition], ScriptCall[PauseReply | NotPaused]],
) -> list[PauseReply | NotPaused]:
    """Make one change in the partitions of a tenant, or in all; first where a move takes settings from.

    Raises:
        MapChanged: A partition has another map. Others may have the change.
    """
    first = 0 if tenant is None else opened.homes.old_partitions(tenant)[0]
    replies: list[PauseReply | NotPaused] = []
    for is_first in (True, False):
        chosen = [each for each in opened.of(tenant) if (each.keys.partition == first) == is_first]
        replies += run_all([call(each) for each in chosen], opened.client)
        # A repetition with another map may not come to these partitions, and finds no more to change there.
        if change is not None:
            change.count |= any(isinstance(each, PauseReply) and each.changed for each in replies)
        if "moved" in replies:
            raise MapChanged.of(opened.name)
    return replies
