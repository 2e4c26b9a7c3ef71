"""``celery dq dead``: look at dead letters, replay or delete them."""

from __future__ import annotations

import click

from celery_dq.app.api.api import DQ
from celery_dq.cli.output import COUNT, command, show, show_table
from celery_dq.cli.typos import require_queue
from celery_dq.errors import InvalidRequest


@click.group()
def dead() -> None:
    """List, replay and purge dead letters."""


@dead.command("list")
@click.argument("queue")
@click.option("--limit", default=50, show_default=True, type=COUNT, help="Number to show, the latest first.")
@command
def dead_list(dq: DQ, as_json: bool, queue: str, limit: int) -> None:
    """List the dead letters of QUEUE, with their reasons."""
    columns = ("id", "reason", "at", "task", "tenant", "deliveries", "worker", "args")
    letters = dq.dead_letters[queue].list(limit)
    if not letters:
        # Dead letters outlive their queue.
        require_queue(queue, dq.dead_letters)
    show_table(as_json, letters, columns, f"{queue!r} has no dead letters.")


@dead.command("replay")
@click.argument("queue")
@click.argument("message_id", required=False)
@click.option("--all", "everything", is_flag=True, help="All dead letters.")
@command
def dead_replay(dq: DQ, as_json: bool, queue: str, message_id: str | None, everything: bool) -> None:
    """Send the dead letter MESSAGE_ID of QUEUE, or --all, again."""
    if (message_id is None) != everything:
        raise click.UsageError("Give either a MESSAGE_ID or --all.")
    count = dq.dead_letters[queue].replay(message_id)
    _finish(dq, queue, message_id, count, as_json, "replayed", f"Replayed {count}.")


@dead.command("purge")
@click.argument("queue")
@click.argument("message_id", required=False)
@click.option("--all", "everything", is_flag=True, help="All dead letters.")
@command
def dead_purge(dq: DQ, as_json: bool, queue: str, message_id: str | None, everything: bool) -> None:
    """Delete the dead letter MESSAGE_ID of QUEUE, or --all, for good."""
    if (message_id is None) != everything:
        raise click.UsageError("Give either a MESSAGE_ID or --all.")
    count = dq.dead_letters[queue].purge(message_id)
    _finish(dq, queue, message_id, count, as_json, "purged", f"Deleted {count}.")


def _finish(
    dq: DQ, queue: str, message_id: str | None, count: int, as_json: bool, word: str, text: str
) -> None:
    """Print the count. A count of 0 is an error when the queue or the id does not exist."""
    if not count:
        require_queue(queue, dq.dead_letters)
        if message_id is not None:
            raise InvalidRequest(
                f"{queue!r} has no dead letter {message_id!r}: 'celery dq dead list {queue}' shows all."
            )
    show(as_json, {word: count}, text)
