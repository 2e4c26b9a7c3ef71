"""``celery dq pause`` and ``resume``: stop and restart a queue or a tenant."""

from __future__ import annotations

from datetime import datetime, timedelta

import click

from celery_dq.app.api.api import DQ
from celery_dq.cli.output import command, show
from celery_dq.cli.times import duration, time
from celery_dq.cli.typos import require_queue, unknown_tenant
from celery_dq.errors import InvalidRequest


@click.command()
@click.argument("queue")
@click.option("--tenant", help="Only this tenant.")
@click.option("--until", type=time, help="End of the pause, such as 2026-03-01T18:00; local time.")
@click.option("--for", "length", type=duration, help="Length of the pause, such as 15m.")
@click.option("--in-advance", is_flag=True, help="Also pause a tenant without a message in QUEUE.")
@command
def pause(
    dq: DQ,
    as_json: bool,
    queue: str,
    tenant: str | None,
    until: datetime | None,
    length: timedelta | None,
    in_advance: bool,
) -> None:
    """Start no more tasks of QUEUE, or of a tenant, until a time or until it is resumed.

    Running tasks end normally, and messages are still accepted. The pause is kept in the broker. Given again,
    the command changes the end of the pause.
    """
    if until is not None and length is not None:
        raise click.UsageError("Give --until or --for, not both.")
    require_queue(queue, dq.queues)
    unknown = "" if in_advance or tenant is None else unknown_tenant(dq, queue, tenant)
    if unknown:
        raise InvalidRequest(f"{unknown} It was not paused; --in-advance pauses it before its first message.")
    found = dq.queues[queue].pause(tenant, until=until or length)
    whose = f"Queue {queue!r}" if tenant is None else f"Tenant {tenant!r} of {queue!r}"
    end = "it is resumed" if found.until is None else found.until.astimezone().isoformat(timespec="seconds")
    show(as_json, found, f"{whose} is paused until {end}.")


@click.command()
@click.argument("queue")
@click.option("--tenant", help="Only this tenant.")
@command
def resume(dq: DQ, as_json: bool, queue: str, tenant: str | None) -> None:
    """End the pause of QUEUE, or of a tenant. Exit status 1: it was not paused."""
    require_queue(queue, dq.queues)
    whose = f"Queue {queue!r}" if tenant is None else f"Tenant {tenant!r} of {queue!r}"
    if not dq.queues[queue].resume(tenant):
        unknown = "" if tenant is None else unknown_tenant(dq, queue, tenant)
        raise InvalidRequest(unknown or f"{whose} is not paused.")
    show(as_json, {"resumed": True}, f"{whose} is resumed.")
