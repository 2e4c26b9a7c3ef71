"""Pause and resume a tenant or a whole queue."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from celery_dq.app.api.audit import AuditTrail
from celery_dq.duration import parse_duration
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.pauses import Pause, pause_of, pause_of_all
from celery_dq.inspector.redis_values import Client, check_moment, check_seconds, server_time_us
from celery_dq.transport.redis.store.partition import Partition
from celery_dq.transport.redis.store.script_batches import run_all

__all__ = ["pause", "resume"]


def pause(
    partitions: Sequence[Partition],
    client: Client,
    tenant: str | None,
    until: datetime | timedelta | None,
    audit: AuditTrail,
) -> Pause:
    """Pause a tenant, or with None the whole queue, and return the pause.

    The pause of a queue ends in all partitions at the same time. A second call completes an interrupted one.

    Args:
        partitions: The partition in which the tenant lives; for the whole queue, all of them.
        client: A redis client.
        tenant: The tenant.
        until: When the pause ends by itself, or after which time from now; None: with :func:`resume`.
            A time without a zone is local time.
        audit: Where the change is written.

    Raises:
        InvalidRequest: The end is over already, by the clock of the server, or is out of range.
    """
    until_us = for_us = 0
    if isinstance(until, timedelta):
        for_us = parse_duration(until, option="until")
        if for_us == 0:
            raise InvalidRequest("until = 0 s: a pause needs a longer time")
        check_seconds("until", for_us / 1e6)
        if len(partitions) > 1:
            until_us, for_us = server_time_us(client) + for_us, 0
    elif until is not None:
        until_us = check_moment("until", until)
    found = None
    end = (
        f"for {until}"
        if isinstance(until, timedelta)
        else "without end"
        if until is None
        else f"until {until}"
    )
    with audit.change(client, "paused", partitions[0].keys.queue, tenant=tenant, details=end) as change:
        calls = [each.pause(tenant, until_us=until_us, for_us=for_us) for each in partitions]
        replies = [reply for reply in run_all(calls, client) if reply is not None]
        if len(replies) == len(partitions):
            found = pause_of_all([pause_of(each.since_us, each.until_us, each.since_us) for each in replies])
            change.count, change.details = int(any(each.changed for each in replies)), str(found)
    if found is None:
        raise InvalidRequest(
            f"until = {until}: this time is over by the clock of the server; give a later one"
        )
    return found


def resume(partitions: Sequence[Partition], client: Client, tenant: str | None, audit: AuditTrail) -> bool:
    """End the pause of a tenant, or with None of the whole queue; return whether there was one."""
    with audit.change(client, "resumed", partitions[0].keys.queue, tenant=tenant) as change:
        replies = run_all([each.resume(tenant) for each in partitions], client)
        change.count = int(any(reply is not None and reply.changed for reply in replies))
    return change.count == 1
