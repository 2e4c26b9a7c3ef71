"""The parts of commands that change much: ``--dry-run``, ``--yes``, the question with a count, and progress.

A terminal shows a bar where rich is installed (extra ``tui``), else a line that counts. Without a terminal
no progress is shown. Ctrl-C and errors end a command with a report of what was changed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import click

from celery_dq.app.api.audit import OnProgress, ignore_progress
from celery_dq.cli.output import print_line, show, show_before_error

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


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
    interrupted: str = "",
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
        interrupted: What to do after Ctrl-C, if anything.
    """
    count = 0
    if not yes or dry_run:
        count = call(dry_run=True, on_progress=lambda done: None)
    if dry_run:
        text, data = f"{counted(count, noun)} would be {word}; none was.", {"found": count, word: 0}
    else:
        if count:
            confirm(question.format(counted(count, noun)))
        with reported_progress(as_json, word, noun, count, interrupted) as on_progress:
            count = call(dry_run=False, on_progress=on_progress)
        text, data = f"{word.capitalize()} {count:,}.", {word: count}
    reason = "" if count else nothing()
    show(as_json, data, f"{text} {reason}".rstrip())
    if reason:
        raise SystemExit(1)


def change_each(
    as_json: bool,
    names: Iterable[str],
    change: Callable[[str], T],
    report: Callable[[dict[str, T]], tuple[Any, str | Sequence[str]]],
    *,
    word: str,
    noun: str,
) -> dict[str, T]:
    """Change one name after the other, and print the outcomes, also if Ctrl-C or an error ends the loop.

    Args:
        as_json: Whether to print JSON.
        names: The names.
        change: Changes one of them.
        report: Returns outcomes by name as JSON and as text.
        word: Past participle that names the change.
        noun: The things that are changed, in the singular.

    Returns:
        The outcomes.
    """
    chosen, outcomes = dict.fromkeys(names), dict[str, T]()
    try:
        for name in chosen:
            outcomes[name] = change(name)
    except KeyboardInterrupt:
        show(as_json, *report(outcomes))
        rest = counted(len(chosen) - len(outcomes), noun)
        print_line(f"Interrupted: {rest} not {word}, or not known to be.", err=True)
        raise SystemExit(INTERRUPTED) from None
    except Exception:
        if outcomes:
            show_before_error(as_json, *report(outcomes))
        raise
    show(as_json, *report(outcomes))
    return outcomes


def forget_each(
    as_json: bool, names: Sequence[str], forget: Callable[[str], bool], noun: str, otherwise: str
) -> None:
    """Forget one name after the other, and print `otherwise` about those that were not there.

    Raises:
        click.UsageError: There are no names.
    """
    if not names:
        raise click.UsageError("--forget needs NAMES.")

    def report(forgotten: dict[str, bool]) -> tuple[Any, Sequence[str]]:
        lines = [f"{name!r}: {'forgotten' if done else otherwise}" for name, done in forgotten.items()]
        return {"forgotten": [name for name, done in forgotten.items() if done]}, lines

    change_each(as_json, names, forget, report, word="forgotten", noun=noun)


#: Seconds between two updates.
_STEP_S = 0.2
#: The exit status of a command that Ctrl-C has ended, as shells have it.
INTERRUPTED = 130


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: '1 message', '2,000 messages'."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


@contextmanager
def reported_progress(
    as_json: bool, word: str, noun: str, total: int = 0, interrupted: str = ""
) -> Iterator[OnProgress]:
    """Show the progress of a call, and how far the call got if it does not end.

    Args:
        as_json: Whether to print JSON.
        word: Past participle that names the change; also the key in JSON.
        noun: The things that are changed, in the singular.
        total: Their expected number; 0 when it is not known.
        interrupted: What to do after Ctrl-C, if anything.

    Yields:
        The function to call with the number of changes.
    """
    done, shown_at = 0, time.monotonic()

    def on_progress(count: int) -> None:
        nonlocal done, shown_at
        done = count
        if time.monotonic() - shown_at >= _STEP_S:
            shown_at = time.monotonic()
            show_count(count)

    try:
        with _shown(word, total) as show_count:
            yield on_progress
    except KeyboardInterrupt:
        # The chunk that was under way may have been changed, too.
        of_total = f" of {total:,}" if total else ""
        text = f"Interrupted: at least {counted(done, noun)}{of_total} {word}. {interrupted}".rstrip()
        show(as_json, {word: done, "interrupted": True}, text)
        raise SystemExit(INTERRUPTED) from None
    except Exception:
        if done:
            text = f"At least {counted(done, noun)} {word} before this error:"
            click.echo(text, err=True)
        raise


@contextmanager
def _shown(word: str, total: int) -> Iterator[OnProgress]:
    """Yield a function that shows a count on the terminal of stderr."""
    if not sys.stderr.isatty():
        yield ignore_progress
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        with _counting_line(word, total) as show_count:
            yield show_count
        return
    numbers = "{task.completed:,.0f} of {task.total:,.0f} " if total else "{task.completed:,.0f} "
    columns = (BarColumn(), TextColumn(numbers + word), TimeRemainingColumn())
    # Without a thread of its own the bar moves when the call reports.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=total or None)

        def show_count(count: int) -> None:
            # More may have come since they were counted.
            bar.update(task, completed=count, total=max(total, count) if total else None)
            bar.refresh()

        yield show_count


@contextmanager
def _counting_line(word: str, total: int) -> Iterator[OnProgress]:
    is_shown = False
    of_total = f" of {total:,}" if total else ""

    def show_count(count: int) -> None:
        nonlocal is_shown
        is_shown = True
        click.echo(f"\r{count:,}{of_total} {word} ", err=True, nl=False)

    try:
        yield show_count
    finally:
        if is_shown:
            click.echo(err=True)
