"""``celery dq quotas``: what tenants may take."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from celery_dq.app.api.api import DQ
from celery_dq.cli.output import command, show
from celery_dq.cli.typos import nearest, require_queue, unknown_tenant
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.tenants import QuotaOrigin
from celery_dq.options.quota import MAX_CONCURRENCY, Quota


@click.group()
def quotas() -> None:
    """Show and set quotas of tenants; changes take effect at once."""


@quotas.command("get")
@click.argument("queue")
@click.argument("tenant", required=False)
@command
def quota_get(dq: DQ, as_json: bool, queue: str, tenant: str | None) -> None:
    """Show the quota in force for TENANT; without TENANT the default, all own quotas, and paused tenants.

    Each quota is shown with the user or worker that set it, and the time.

    Exit status 1: TENANT has no message and no quota of its own.
    """
    require_queue(queue, dq.queues)
    if tenant is not None:
        quota = dq.quotas.get(queue, tenant)
        unknown = unknown_tenant(dq, queue, tenant)
        if unknown:
            raise InvalidRequest(f"{unknown} The default would apply to it: {quota}.")
        (origin,) = dq.quotas.origins(queue, tenant)
        show(as_json, _row(quota, origin), f"{quota} ({origin})")
        return
    default, own, paused = dq.quotas.get(queue), dq.quotas.list(queue), dq.quotas.paused(queue)
    of_default, *of_own = dq.quotas.origins(queue, None, *own)
    lines = [f"(default): {default} ({of_default})"]
    lines += [
        f"{name}: {quota} ({origin})" for (name, quota), origin in zip(own.items(), of_own, strict=True)
    ]
    lines += [f"{name}: paused since {since.isoformat(timespec='seconds')}" for name, since in paused.items()]
    rows = {name: _row(own[name], origin) for name, origin in zip(own, of_own, strict=True)}
    found = {"default": _row(default, of_default), "tenants": rows, "paused": paused}
    show(as_json, found, "\n".join(lines))


def _row(quota: Quota, origin: QuotaOrigin) -> dict[str, Any]:
    return {**asdict(quota), **asdict(origin)}


@quotas.command("set")
@click.argument("queue")
@click.argument("tenant", required=False)
@click.option("--rate", help="50/s (or 50), 3000/m, 10/h, or 'unlimited'.")
@click.option(
    "--burst", type=float, help="Messages that an idle tenant may start at once, 1 to 1000000; needs a rate."
)
@click.option("--weight", type=float, help="Share relative to other tenants, 0.001 to 1000.")
@click.option("--concurrency", help="Messages that may run at once, 1 to 1000000, or 'unlimited'.")
@command
def quota_set(dq: DQ, as_json: bool, queue: str, tenant: str | None, **parts: Any) -> None:
    """Set the quota of TENANT, or without TENANT the default. Parts without an option stay.

    TENANT need not have a message yet.
    """
    given = {name: value for name, value in parts.items() if value is not None}
    if not given:
        raise click.UsageError("Name at least one of --rate, --burst, --weight, --concurrency.")
    for name in ("rate", "concurrency"):
        if given.get(name) == "unlimited":
            given[name] = None
    if isinstance(given.get("concurrency"), str):
        if not given["concurrency"].isdecimal():
            raise click.UsageError(
                f"--concurrency {given['concurrency']!r}: give a whole number from 1 to {MAX_CONCURRENCY}, "
                "or 'unlimited'; to stop the tenant, use 'celery dq quotas pause'."
            )
        given["concurrency"] = int(given["concurrency"])
    if isinstance(given.get("rate"), str):
        given["rate"] = _number(given["rate"])
    require_queue(queue, dq.queues)
    unknown = "" if tenant is None else unknown_tenant(dq, queue, tenant)
    quota = dq.quotas.set_default(queue, **given) if tenant is None else dq.quotas.set(queue, tenant, **given)
    show(as_json, quota, str(quota))
    if unknown:
        click.echo(f"Note: before this, {unknown[0].lower()}{unknown[1:]}", err=True)


def _number(rate: str) -> str | float:
    """Return a rate without a unit as a number per second; other texts unchanged."""
    try:
        return float(rate)
    except ValueError:
        return rate


@quotas.command("rm")
@click.argument("queue")
@click.argument("tenant", required=False)
@command
def quota_remove(dq: DQ, as_json: bool, queue: str, tenant: str | None) -> None:
    """Remove the own quota of TENANT, or without TENANT the default that was set live.

    Exit status 1: there is none.
    """
    require_queue(queue, dq.queues)
    if tenant is None:
        if dq.quotas.origins(queue, None)[0].source != "default":
            raise InvalidRequest(f"No default is set live in {queue!r}; in force: {dq.quotas.get(queue)}.")
        dq.quotas.remove_default(queue)
    else:
        own = dq.quotas.list(queue)
        if tenant not in own:
            raise InvalidRequest(
                f"Tenant {tenant!r} has no quota of its own in {queue!r}.{nearest(tenant, own)}"
            )
        dq.quotas.remove(queue, tenant)
    quota = dq.quotas.get(queue, tenant)
    show(as_json, quota, f"Removed; in force now: {quota}")


@quotas.command("apply")
@click.argument("queue")
@command
def quota_apply(dq: DQ, as_json: bool, queue: str) -> None:
    """Apply the quota of these settings to QUEUE, even if workers have replaced it."""
    require_queue(queue, dq.queues)
    quota = dq.quotas.apply_settings(queue)
    show(as_json, quota, f"In force now: {quota}")


@quotas.command("pause")
@click.argument("queue")
@click.argument("tenant")
@click.option("--in-advance", is_flag=True, help="Also pause a tenant without a message in QUEUE.")
@command
def quota_pause(dq: DQ, as_json: bool, queue: str, tenant: str, in_advance: bool) -> None:
    """Stop TENANT until it is resumed, whatever its quota. Running tasks end normally."""
    require_queue(queue, dq.queues)
    unknown = "" if in_advance else unknown_tenant(dq, queue, tenant)
    if unknown:
        raise InvalidRequest(f"{unknown} It was not paused; --in-advance pauses it before its first message.")
    quota = dq.quotas.pause(queue, tenant)
    show(as_json, quota, str(quota))


@quotas.command("resume")
@click.argument("queue")
@click.argument("tenant")
@command
def quota_resume(dq: DQ, as_json: bool, queue: str, tenant: str) -> None:
    """Resume a paused TENANT. Exit status 1: TENANT is not paused."""
    require_queue(queue, dq.queues)
    if tenant not in dq.quotas.paused(queue):
        unknown = unknown_tenant(dq, queue, tenant)
        raise InvalidRequest(unknown or f"Tenant {tenant!r} is not paused in {queue!r}.")
    quota = dq.quotas.resume(queue, tenant)
    show(as_json, quota, str(quota))
