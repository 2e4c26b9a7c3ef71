"""``celery dq dead``: look at dead letters, edit, replay or delete them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import click

from celery_dq.app.api.api import DQ
from celery_dq.app.api.redis_dead_letters import DeadLetters
from celery_dq.cli.arguments import (
    arguments_options,
    read_arguments,
    require_queue,
    since as since_type,
    time,
)
from celery_dq.cli.bulk import bulk, change_many
from celery_dq.cli.output import COUNT, cell, command, print_line, show, show_table
from celery_dq.cli.quotas import read_rate
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.dead_letters import DeadLetter, DeadLetterFilter
from celery_dq.inspector.redis_values import CHUNK
from celery_dq.shown import plain, shell_word

#: Dead letters that a search looks at. A multiple of :data:`CHUNK`.
MOST_LOOKS = 10_000


@click.group()
def dead() -> None:
    """List, show, edit, replay and purge dead letters."""


def filters(function: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command: add the options that choose dead letters, which are its argument ``wanted``."""

    @wraps(function)
    def run(*args: Any, **options: Any) -> None:
        parts = (options.pop(name) for name in ("tenant", "task", "reason", "since"))
        function(*args, wanted=DeadLetterFilter(*parts), **options)

    for option in (
        click.option("--since", type=since_type, help="Those since a time, or of a time as long as 2h."),
        click.option("--reason", help="Those with this text in their reason."),
        click.option("--task", help="Those of this task name."),
        click.option("--tenant", help="Those of this tenant."),
    ):
        run = option(run)
    return run


@dead.command("list")
@click.argument("queue")
@filters
@click.option("--limit", default=50, show_default=True, type=COUNT, help="Number to show, the latest first.")
@command
def dead_list(dq: DQ, as_json: bool, queue: str, wanted: DeadLetterFilter, limit: int) -> None:
    """List the dead letters of QUEUE that all given options name, with their reasons.

    A search ends after the latest 10,000 dead letters, and says so.
    """
    columns = ("id", "reason", "at", "task", "tenant", "deliveries", "worker", "args")
    letters = dq.dead_letters[queue]
    is_search = wanted != DeadLetterFilter()
    found, looked_at = _search(letters, wanted, limit) if is_search else (letters.list(limit), 0)
    if not found:
        # Dead letters outlive their queue.
        require_queue(queue, dq.dead_letters)
    nothing = f"No dead letter of {queue!r} matches." if is_search else f"{queue!r} has no dead letters."
    show_table(as_json, found, columns, nothing)
    if is_search and looked_at < (total := len(letters)):
        print_line(f"Looked at the latest {looked_at:,} of {total:,} dead letters.", err=as_json)


def _search(letters: DeadLetters, wanted: DeadLetterFilter, limit: int) -> tuple[list[DeadLetter], int]:
    """Return the latest dead letters that are meant, and the number of those that were looked at."""
    letters.check_tenant_filter(wanted.tenant)
    found: list[DeadLetter] = []
    for offset in range(0, MOST_LOOKS, CHUNK):
        part = letters.list(CHUNK, offset)
        for looked_at, each in enumerate(part, offset + 1):
            if wanted.matches(each):
                found.append(each)
                if len(found) == limit:
                    return found, looked_at
        if len(part) < CHUNK:
            return found, offset + len(part)
    return found, MOST_LOOKS


@dead.command("replay")
@click.argument("queue")
@click.argument("message_id", required=False)
@click.option("--all", "everything", is_flag=True, help="All dead letters.")
@filters
@click.option("--rate", help="How many to send, such as 50/s (or 50); default: as fast as possible.")
@bulk
@command
def dead_replay(
    dq: DQ,
    as_json: bool,
    queue: str,
    message_id: str | None,
    everything: bool,
    wanted: DeadLetterFilter,
    rate: str | None,
    dry_run: bool,
    yes: bool,
) -> None:
    """Send the dead letter MESSAGE_ID of QUEUE again, or --all, or those that all given options name."""
    if (message_id is None) == (wanted == DeadLetterFilter() and not everything):
        raise click.UsageError("Give either a MESSAGE_ID or --all, or --tenant, --task, --reason, --since.")
    change_many(
        as_json,
        partial(
            dq.dead_letters[queue].replay,
            message_id,
            wanted=wanted,
            rate=None if rate is None else read_rate(rate),
        ),
        word="replayed",
        question=f"Send {{}} of {queue!r} again?",
        dry_run=dry_run,
        yes=yes or message_id is not None,
        noun="dead letter",
        nothing=partial(_check_names, dq, queue, message_id),
    )


@dead.command("show")
@click.argument("queue")
@click.argument("message_id")
@command
def dead_show(dq: DQ, as_json: bool, queue: str, message_id: str) -> None:
    """Show the dead letter MESSAGE_ID of QUEUE with its arguments, ETA, expiry and priority."""
    letter = dq.dead_letters[queue].show(message_id)
    if letter is None:
        _check_names(dq, queue, message_id)
        return
    if as_json:
        show(True, letter)
        return
    parts = {**vars(letter.letter), **vars(letter)}
    first = ("id", "queue", "reason", "at", "worker", "deliveries", "task", "tenant")
    for name in (*first, "priority", "due", "expires"):
        print_line(f"{name + ':':<12}{cell(parts[name])}")
    for name, value in (("args", letter.args), ("kwargs", letter.kwargs)):
        content = (
            getattr(letter.letter, name) if value is None else json.dumps(plain(value), ensure_ascii=False)
        )
        print_line(f"{name + ':':<12}{cell(content)}")


@dead.command("edit")
@click.argument("queue")
@click.argument("message_id")
@arguments_options
@click.option("--eta", help="A time such as 2026-03-01T18:00, or 'none' for at once.")
@click.option("--priority", type=click.IntRange(0, 9), help="0 to 9; higher is more urgent.")
@click.option("--tenant", help="Another tenant.")
@command
def dead_edit(
    dq: DQ,
    as_json: bool,
    queue: str,
    message_id: str,
    args_: str | None,
    kwargs: str | None,
    eta: str | None,
    priority: int | None,
    tenant: str | None,
) -> None:
    """Change the dead letter MESSAGE_ID of QUEUE, and send it again under its id. Other parts stay."""
    changes: dict[str, Any] = {"priority": priority, "tenant": tenant}
    changes = {name: value for name, value in changes.items() if value is not None}
    changes |= read_arguments(args_, kwargs)
    if eta is not None:
        changes["eta"] = None if eta == "none" else time(eta)
    if not changes:
        raise click.UsageError("Name at least one of --args, --kwargs, --eta, --priority, --tenant.")
    new_id = dq.dead_letters[queue].edit(message_id, **changes)
    if new_id is None:
        _check_names(dq, queue, message_id)
    show(as_json, {"id": new_id}, f"Sent again as {new_id}.")


@dead.command("recover")
@click.argument("queue")
@bulk
@command
def dead_recover(dq: DQ, as_json: bool, queue: str, dry_run: bool, yes: bool) -> None:
    """Make dead letters of messages of QUEUE that nothing names any more, because of foreign writes.

    'celery dq doctor' says whether entries could not be read. Each message of QUEUE is read.
    """
    change_many(
        as_json,
        dq.dead_letters[queue].recover,
        word="recovered",
        question=f"Make dead letters of {{}} of {queue!r} that nothing names?",
        dry_run=dry_run,
        yes=yes,
        nothing=partial(_check_names, dq, queue, None),
    )


@dead.command("purge")
@click.argument("queue")
@click.argument("message_id", required=False)
@click.option("--all", "everything", is_flag=True, help="All dead letters.")
@bulk
@command
def dead_purge(
    dq: DQ, as_json: bool, queue: str, message_id: str | None, everything: bool, dry_run: bool, yes: bool
) -> None:
    """Delete the dead letter MESSAGE_ID of QUEUE, or --all, for good."""
    if (message_id is None) != everything:
        raise click.UsageError("Give either a MESSAGE_ID or --all.")
    change_many(
        as_json,
        partial(dq.dead_letters[queue].purge, message_id),
        word="purged",
        question=f"Delete {{}} of {queue!r} for good?",
        dry_run=dry_run,
        yes=yes or message_id is not None,
        noun="dead letter",
        nothing=partial(_check_names, dq, queue, message_id),
    )


def _check_names(dq: DQ, queue: str, message_id: str | None) -> str:
    """Refuse, after nothing was changed, a queue or an id that does not exist."""
    require_queue(queue, dq.dead_letters)
    if message_id is not None:
        raise InvalidRequest(
            f"{queue!r} has no dead letter {message_id!r}: 'celery dq dead list {shell_word(queue)}' shows "
            "all."
        )
    return ""
