"""The parts that all commands share which change many messages or quotas.

These are ``--dry-run``, ``--yes``, and the question with a count; ``progress`` has the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import click

from celery_dq.app.api.progress import OnProgress
from celery_dq.cli.output import show
from celery_dq.cli.progress import counted, reported_progress

__all__ = ["BulkCall", "bulk", "change_many", "confirm"]

F = TypeVar("F", bound=Callable[..., Any])


class BulkCall(Protocol):
    """A method of ``app.dq`` that changes many messages."""

    def __call__(self, *, dry_run: bool, on_progress: OnProgress) -> int:
        """Return the number of messages that were changed, or with `dry_run` that would be."""


def bulk(function: F) -> F:
    """Decorate a click callback: add ``--dry-run`` and ``--yes``, its arguments ``dry_run`` and ``yes``."""
    dry_run = click.option("--dry-run", is_flag=True, help="Show what would be done, and change nothing.")
    yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
    return dry_run(yes(function))


def confirm(question: str) -> None:
    """Ask a question on stderr, and end the command unless the answer is yes.

    Raises:
        click.Abort: The answer is no.
        click.UsageError: There is no terminal, or no other source of an answer.
    """
    try:
        click.confirm(question, abort=True, err=True)
    except click.Abort as exc:
        if isinstance(exc.__context__, EOFError):
            raise click.UsageError(
                "No answer can be read here, and nothing was changed: --yes makes the change without a "
                "question, --dry-run shows what it would change."
            ) from None
        raise


def change_many(
    as_json: bool,
    call: BulkCall,
    *,
    word: str,
    question: str,
    dry_run: bool,
    yes: bool,
    noun: str = "message",
    nothing: Callable[[], str] = lambda: "",
) -> None:
    """Count what a call would change, ask, call it, and print the number of changes.

    Args:
        as_json: Whether to print JSON.
        call: The method that changes the messages.
        word: Past participle that names the change, such as ``purged``; also the key in JSON.
        question: The question, with ``{}`` for the counted noun.
        dry_run: Whether to count only.
        yes: Whether to leave out the count and the question.
        noun: The things that are changed, in the singular.
        nothing: Called when there was nothing to change. A text is shown, and the exit status is 1.
    """
    count = 0
    if not yes or dry_run:
        count = call(dry_run=True, on_progress=lambda done: None)
    if dry_run:
        text, data = f"{counted(count, noun)} would be {word}; none was.", {"found": count, word: 0}
    else:
        if count:
            confirm(question.format(counted(count, noun)))
        with reported_progress(as_json, word, noun, count) as on_progress:
            count = call(dry_run=False, on_progress=on_progress)
        text, data = f"{word.capitalize()} {count:,}.", {word: count}
    reason = "" if count else nothing()
    show(as_json, data, f"{text} {reason}".rstrip())
    if reason:
        raise SystemExit(1)
