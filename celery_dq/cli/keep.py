"""Quotas, dead letters, and a look at the set-up."""

from __future__ import annotations

from typing import Any

import click

from celery_dq.app.doctor import check_server, check_settings
from celery_dq.app.face import DQ
from celery_dq.cli.output import command, show, show_table, spell


@click.group()
def quotas() -> None:
    """What tenants may take; changes are in force at once."""


@quotas.command("get")
@click.argument("queue")
@click.argument("tenant", required=False)
@command
def quota_get(dq: DQ, as_json: bool, queue: str, tenant: str | None) -> None:
    """The quota in force for TENANT, or without it the default and all tenants' own ones."""
    if tenant is not None:
        quota = dq.quotas.get(queue, tenant)
        show(as_json, quota, spell(quota))
        return
    default, own = dq.quotas.get(queue), dq.quotas.list(queue)
    lines = [f"(default): {spell(default)}", *(f"{name}: {spell(quota)}" for name, quota in own.items())]
    show(as_json, {"default": default, "tenants": own}, "\n".join(lines))


@quotas.command("set")
@click.argument("queue")
@click.argument("tenant", required=False)
@click.option("--rate", help="50/s, 3000/m, 10/h, or 'unlimited'.")
@click.option("--burst", type=float, help="Messages that an idle tenant may take at once.")
@click.option("--weight", type=float, help="Share relative to the others.")
@click.option("--concurrency", help="Messages that may run at once, or 'unlimited'.")
@command
def quota_set(dq: DQ, as_json: bool, queue: str, tenant: str | None, **parts: Any) -> None:
    """Set the quota of TENANT, or without it the default. What is not named stays."""
    given = {name: value for name, value in parts.items() if value is not None}
    if not given:
        raise click.UsageError("Name at least one of --rate, --burst, --weight, --concurrency.")
    for name in ("rate", "concurrency"):
        if given.get(name) == "unlimited":
            given[name] = None
    if isinstance(given.get("concurrency"), str):
        if not given["concurrency"].isdecimal():
            raise click.UsageError("Give --concurrency a whole number, or 'unlimited'.")
        given["concurrency"] = int(given["concurrency"])
    quota = dq.quotas.set_default(queue, **given) if tenant is None else dq.quotas.set(queue, tenant, **given)
    show(as_json, quota, spell(quota))


@quotas.command("rm")
@click.argument("queue")
@click.argument("tenant", required=False)
@command
def quota_remove(dq: DQ, as_json: bool, queue: str, tenant: str | None) -> None:
    """Remove the own quota of TENANT, or without it the default that was set live."""
    if tenant is None:
        dq.quotas.remove_default(queue)
    else:
        dq.quotas.remove(queue, tenant)
    quota = dq.quotas.get(queue, tenant)
    show(as_json, quota, f"Removed; in force now: {spell(quota)}")


@quotas.command("pause")
@click.argument("queue")
@click.argument("tenant")
@command
def quota_pause(dq: DQ, as_json: bool, queue: str, tenant: str) -> None:
    """Let nothing of TENANT start."""
    quota = dq.quotas.pause(queue, tenant)
    show(as_json, quota, spell(quota))


@quotas.command("resume")
@click.argument("queue")
@click.argument("tenant")
@command
def quota_resume(dq: DQ, as_json: bool, queue: str, tenant: str) -> None:
    """Undo pause."""
    quota = dq.quotas.resume(queue, tenant)
    show(as_json, quota, spell(quota))


@click.group()
def dead() -> None:
    """Dead letters: what was given up on."""


@dead.command("list")
@click.argument("queue")
@click.option("--limit", default=50, show_default=True, help="How many, the latest first.")
@command
def dead_list(dq: DQ, as_json: bool, queue: str, limit: int) -> None:
    """Dead letters of QUEUE, with the reason."""
    columns = ("id", "reason", "at", "task", "tenant", "deliveries", "worker", "args")
    show_table(as_json, dq.dead_letters[queue].list(limit), columns, f"{queue!r} has no dead letters.")


@dead.command("replay")
@click.argument("queue")
@click.argument("message_id", required=False)
@click.option("--all", "everything", is_flag=True, help="All dead letters.")
@command
def dead_replay(dq: DQ, as_json: bool, queue: str, message_id: str | None, everything: bool) -> None:
    """Send MESSAGE_ID of QUEUE, or --all, again."""
    if (message_id is None) != everything:
        raise click.UsageError("Name a MESSAGE_ID or --all, one of them.")
    count = dq.dead_letters[queue].replay(message_id)
    show(as_json, {"replayed": count}, f"Replayed {count}.")


@dead.command("purge")
@click.argument("queue")
@click.argument("message_id", required=False)
@click.option("--all", "everything", is_flag=True, help="All dead letters.")
@command
def dead_purge(dq: DQ, as_json: bool, queue: str, message_id: str | None, everything: bool) -> None:
    """Delete MESSAGE_ID of QUEUE, or --all, for good."""
    if (message_id is None) != everything:
        raise click.UsageError("Name a MESSAGE_ID or --all, one of them.")
    count = dq.dead_letters[queue].purge(message_id)
    show(as_json, {"purged": count}, f"Deleted {count}.")


@click.command()
@command
def doctor(dq: DQ, as_json: bool) -> None:
    """Check the settings, the tasks' tenants, and the server. Exit status 1 when something is wrong."""
    app = click.get_current_context().obj.app
    app.loader.import_default_modules()  # the tasks, as a worker knows them
    findings = [*check_settings(app), *check_server(app)]
    lines = [f"{each.level.upper():8}{each.problem} {each.remedy}".rstrip() for each in findings]
    show(as_json, findings, "\n".join(lines))
    if any(each.level == "error" for each in findings):
        raise SystemExit(1)
