"""``celery dq quotas``: what tenants may take."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from celery_dq.app.api.api import DQ
from celery_dq.app.api.quotas import QuotasApi
from celery_dq.cli.arguments import UP_TO_A_DAY, nearest, require_queue, seconds_option, unknown_tenant
from celery_dq.cli.bulk import bulk, confirm, counted, reported_progress
from celery_dq.cli.output import command, print_line, show
from celery_dq.errors import InvalidQuota, InvalidRequest, MissingLibrary
from celery_dq.inspector.live_quotas import LiveQuotas, QuotaChange, read_document, written
from celery_dq.inspector.tenants import QuotaOrigin
from celery_dq.keys import ENVIRONMENTS
from celery_dq.options.quota import MAX_CONCURRENCY, MAX_WAITING, WHEN_FULL, Quota
from celery_dq.shown import shell_word


class _QuotasGroup(click.Group):
    """A group that names ``get`` to users who expect ``list``, as other groups have it."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names, as click does."""
        if args[:1] == ["list"]:
            ctx.fail("No such command 'list'. 'celery dq quotas get QUEUE' lists all quotas of a queue.")
        return super().resolve_command(ctx, args)


@click.group(cls=_QuotasGroup)
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
        pause = dq.quotas.paused(queue).get(tenant)
        paused_text = "" if pause is None else f"; paused {pause}"
        row = {**_row(quota, origin), "pause": pause}
        show(as_json, row, f"{quota} ({origin}){paused_text}")
        return
    default, own, paused = dq.quotas.get(queue), dq.quotas.list(queue), dq.quotas.paused(queue)
    of_default, *of_own = dq.quotas.origins(queue, None, *own)
    lines = [f"(default): {default} ({of_default})"]
    lines += [
        f"{_shown(name)}: {quota} ({origin})"
        for (name, quota), origin in zip(own.items(), of_own, strict=True)
    ]
    lines += [f"{_shown(name)}: paused {pause}" for name, pause in paused.items()]
    rows = {name: _row(own[name], origin) for name, origin in zip(own, of_own, strict=True)}
    found = {"default": _row(default, of_default), "tenants": rows, "paused": paused}
    show(as_json, found, lines)


def _shown(tenant: str) -> str:
    return tenant or '""'


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
@click.option("--max-waiting", help="Messages that may wait for their turn, 1 to 1000000000, or 'unlimited'.")
@click.option(
    "--when-full",
    type=click.Choice(WHEN_FULL),
    help="What happens to a call when that many wait: it fails, waits, or pushes the first message out.",
)
@click.option("--spread", type=int, help="Number of partitions of QUEUE in which TENANT lives, from 1.")
@seconds_option(
    "--timeout", 60.0, "Seconds to wait for the moves of a tenant whose spread changes.", UP_TO_A_DAY
)
@click.option(
    "--paused/--no-paused", default=None, help="As 'celery dq pause' and 'resume' do without an end."
)
@command
def quota_set(dq: DQ, as_json: bool, queue: str, tenant: str | None, timeout: float, **parts: Any) -> None:
    """Set the quota of TENANT, or without TENANT the default. Parts without an option stay.

    TENANT need not have a message yet. With another --spread, its messages move. --paused without TENANT
    pauses all tenants without a quota of their own.
    """
    given = {name: value for name, value in parts.items() if value is not None}
    if not given:
        parts_named = (
            "--rate, --burst, --weight, --concurrency, --max-waiting, --when-full, --spread, --paused"
        )
        raise click.UsageError(f"Name at least one of {parts_named}.")
    if tenant is None and "spread" in given:
        raise click.UsageError("--spread needs a TENANT: it belongs to the quota of one tenant.")
    whom = shell_word(tenant) if tenant else "…"
    stop = f"to stop the tenant, use 'celery dq pause {shell_word(queue)} --tenant {whom}'"
    for part, most, remedy in (
        ("concurrency", MAX_CONCURRENCY, f"; {stop}"),
        ("max_waiting", MAX_WAITING, ""),
    ):
        if part in given:
            count = _unless_unlimited(given[part])
            if count is not None and not count.isdecimal():
                option = part.replace("_", "-")
                raise click.UsageError(
                    f"--{option} {count!r}: give a whole number from 1 to {most}, or 'unlimited'{remedy}."
                )
            given[part] = None if count is None else int(count)
    if "rate" in given:
        number = read_rate(given["rate"].partition("/")[0])
        if isinstance(number, float) and number <= 0:
            raise click.UsageError(
                f"--rate {given['rate']}: give a rate above 0, or 'unlimited'; {stop}, or --paused."
            )
        given["rate"] = read_rate(given["rate"])
    require_queue(queue, dq.queues)
    unknown = "" if tenant is None else unknown_tenant(dq, queue, tenant)
    if tenant is None:
        quota = dq.quotas.set_default(queue, **given)
    else:
        quota = dq.quotas.set(queue, tenant, timeout=timeout, **given)
    show(as_json, quota, str(quota))
    if unknown:
        print_line(f"Note: before this, {unknown[0].lower()}{unknown[1:]}", err=True)


def read_rate(rate: str) -> str | float | None:
    """Return a rate without a unit as a number per second, None for "unlimited", other texts unchanged."""
    try:
        return float(rate)
    except ValueError:
        return _unless_unlimited(rate)


def _unless_unlimited(text: str) -> str | None:
    # The errors of quotas name None.
    return None if text.lower() in ("unlimited", "none") else text


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


@quotas.command("export")
@click.argument("queues", nargs=-1)
@click.option("--output", type=click.Path(dir_okay=False, writable=True), help="File to write.")
@command
def quota_export(dq: DQ, as_json: bool, queues: tuple[str, ...], output: str | None) -> None:
    """Print the live quotas of QUEUES (default: all queues that have any) as JSON, for 'import'.

    Quotas of the settings and pauses are not part of it.
    """
    known = list(dq.queues)
    for queue in queues:
        require_queue(queue, known)
    found = {queue: dq.quotas.live(queue) for queue in queues or known}
    text = written({name: each for name, each in found.items() if queues or each != LiveQuotas()})
    if output is None:
        click.echo(text)
    else:
        Path(output).write_text(text + "\n", encoding="utf-8")


@quotas.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@bulk
@command
def quota_import(dq: DQ, as_json: bool, file: str, dry_run: bool, yes: bool) -> None:
    """Make the live quotas of the queues in FILE (- is the standard input) equal to FILE.

    A quota that FILE does not have is removed. Queues that FILE does not name stay as they are, and so do
    pauses. FILE is checked before the first change. It is JSON, or YAML if its name ends in .yaml or .yml.
    """
    if file == "-" and not (dry_run or yes):
        raise click.UsageError("FILE - needs --yes or --dry-run: no question can be asked there.")
    with click.open_file(file, "rb") as opened:
        text = opened.read()
    if file.endswith((".yaml", ".yml")):
        text = yaml_as_json(text, file)
    wanted = read_document(text, "the standard input" if file == "-" else file)
    known = list(dq.queues)
    for queue in wanted:
        require_queue(queue, known)
    changes = [change for queue, each in wanted.items() for change in dq.quotas.changes(queue, each)]
    _make(dq.quotas, as_json, changes, dry_run, yes)


@quotas.command("copy")
@click.argument("queue")
@click.option("--to", help="The queue that gets the quotas; with --to-environment, default: QUEUE.")
@click.option(
    "--to-environment",
    type=click.Choice(ENVIRONMENTS),
    help="The environment of the queue that gets the quotas. Default: dq_environment.",
)
@bulk
@command
def quota_copy(
    dq: DQ, as_json: bool, queue: str, to: str | None, to_environment: str | None, dry_run: bool, yes: bool
) -> None:
    """Make the live quotas of the queue --to equal to those of QUEUE.

    A quota that QUEUE does not have is removed. Quotas of the settings and pauses are not copied. With
    --to-environment, the quotas of a sandbox go online, or those online into a sandbox.
    """
    if to is None and to_environment is None:
        raise click.UsageError("Give --to, --to-environment, or both.")
    known = list(dq.queues)
    require_queue(queue, known)
    target = queue if to is None else to
    is_elsewhere = to_environment not in (None, dq.options.environment)
    if to_environment is None and to in ENVIRONMENTS and to not in known:
        raise click.UsageError(f"There is no queue {to!r}. For the environment, give --to-environment {to}.")
    if not is_elsewhere:
        require_queue(target, known)
    if queue == target and not is_elsewhere:
        raise InvalidRequest(f"--to {target!r} is the source itself; name another queue or --to-environment")
    wanted = dq.quotas.live(queue)
    if wanted == LiveQuotas():
        raise InvalidRequest(f"{queue!r} has no live quotas to copy; in force there: {dq.quotas.get(queue)}.")
    with dq.quotas.in_environment(str(to_environment)) if is_elsewhere else nullcontext(dq.quotas) as there:
        note = " Quotas of the settings and pauses are not copied."
        _make(there, as_json, there.changes(target, wanted), dry_run, yes, note)


def _make(
    quotas_api: QuotasApi,
    as_json: bool,
    changes: list[QuotaChange],
    dry_run: bool,
    yes: bool,
    more: str = "",
) -> None:
    """Show changes, ask, and make them."""
    asks = bool(changes) and not (dry_run or yes)
    if asks or not as_json:
        for change in changes:
            print_line(str(change), err=as_json)
    if asks:
        removed = sum(change.after is None for change in changes)
        note = f", {removed} of them removals" if removed else ""
        confirm(f"Make {counted(len(changes), 'change')}{note}?")
    made = 0
    if not dry_run:
        with reported_progress(as_json, "made", "change", len(changes)) as on_progress:
            made = quotas_api.make(changes, on_progress=on_progress)
    text = f"{counted(len(changes), 'change')}{', none' if dry_run else ''} made."
    show(as_json, {"changes": changes, "made": made}, text + more if changes else "No difference.")


def yaml_as_json(text: bytes, where: str) -> str:
    """Return a YAML document as JSON.

    A name, that is a key of a mapping, stays the text in the file: tenants such as ``007`` and ``no`` become
    neither a number nor a boolean.

    Args:
        text: The document.
        where: Its name, for the error.

    Raises:
        MissingLibrary: PyYAML is not installed.
        InvalidQuota: The text is not YAML, or a name stands twice in one mapping. The error names the place.
    """
    try:
        import yaml
    except ImportError as exc:
        raise MissingLibrary(
            f"{where} needs PyYAML, which is not installed: pip install PyYAML, or write the file as JSON"
        ) from exc

    class Loader(yaml.SafeLoader):
        """Takes the keys of mappings as texts."""

    def mapping(loader: Loader, node: yaml.MappingNode) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise InvalidQuota(f"{where} is not YAML: a name in line {line} is not text")
            if key.value in found:
                raise InvalidQuota(f"{where}: {key.value!r} stands twice, again in line {line}; remove one")
            found[key.value] = loader.construct_object(value, deep=True)
        return found

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    try:
        return json.dumps(yaml.load(text, Loader), default=str)  # noqa: S506 - a safe loader
    except InvalidQuota:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise InvalidQuota(f"{where} is not YAML: {exc}; 'celery dq quotas export' writes the form") from None
