"""``celery dq peek``, ``find``, ``explain``, ``cancel`` and others: look at messages, cancel or edit them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial

import click

from celery_dq.app.api.api import DQ
from celery_dq.app.api.message_edits import CHANGED
from celery_dq.app.api.queues import QueueApi
from celery_dq.cli.arguments import (
    arguments_options,
    duration,
    listed,
    nearest,
    queue_and_partition,
    read_arguments,
    require_queue,
    time,
    unknown_tenant,
)
from celery_dq.cli.bulk import bulk, change_each, change_many, counted
from celery_dq.cli.output import COUNT, command, print_line, show, show_table
from celery_dq.duration import format_duration
from celery_dq.errors import InvalidRequest

_MESSAGE_COLUMNS = ("task_id", "queue", "state", "task", "tenant", "priority", "due", "args", "consumer")


@click.command()
@click.argument("queue")
@click.option("--limit", default=10, show_default=True, type=COUNT, help="Messages to show.")
@click.option("--tenant", help="Only messages of this tenant.")
@click.option("--delayed", is_flag=True, help="Messages that wait for their ETA.")
@command
def peek(dq: DQ, as_json: bool, queue: str, limit: int, tenant: str | None, delayed: bool) -> None:
    """Show the next waiting messages of QUEUE, or of its partition QUEUE/NUMBER, without claiming them."""
    whole, partition = queue_and_partition(queue, dq.queues)
    rows = dq.queues[whole].peek(limit, tenant=tenant, delayed=delayed, partition=partition)
    if not rows and tenant is not None and (unknown := unknown_tenant(dq, whole, tenant)):
        raise InvalidRequest(unknown)
    show_table(as_json, rows, _MESSAGE_COLUMNS, f"No message waits in {queue!r}.")


@click.command()
@click.argument("task_id")
@command
def find(dq: DQ, as_json: bool, task_id: str) -> None:
    """Find the queue of the task TASK_ID. Exit status 1: it is in no queue."""
    rows = dq.find(task_id)
    show_table(as_json, rows, _MESSAGE_COLUMNS, f"Task {task_id} is in no queue.")
    if not rows:
        names = list(dq.queues)
        looked = f"Looked in {counted(len(names), 'queue')} ({listed(names)})"
        # A retry or a replay that reuses the task id gets a message id with a suffix.
        looked += ", for this id and its repetitions ~1 to ~9." if dq.serves_queues() else "."
        print_line(looked, err=as_json)
        if dq.serves_queues() and (explained := dq.explain(task_id=task_id)).reason == "cancelled":
            print_line(explained.sentence, err=as_json)
        raise SystemExit(1)


@click.command()
@click.argument("queue")
@click.argument("task_ids", nargs=-1)
@click.option("--tenant", help="All messages of this tenant.")
@click.option("--task-name", help="All messages of this task.")
@click.option("--in-advance", is_flag=True, help="Also TASK_IDS that are not published yet.")
@bulk
@command
def cancel(
    dq: DQ,
    as_json: bool,
    queue: str,
    task_ids: tuple[str, ...],
    tenant: str | None,
    task_name: str | None,
    in_advance: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Cancel the tasks TASK_IDS in QUEUE, or all tasks of a tenant or of a task name.

    Exit status 1: a task was not cancelled, because it is not in QUEUE, a worker has it, or it is a dead
    letter.
    """
    if sum((bool(task_ids), tenant is not None, task_name is not None)) != 1:
        raise click.UsageError("Give exactly one of TASK_IDS, --tenant and --task-name.")
    if in_advance and not task_ids:
        raise click.UsageError("--in-advance needs TASK_IDS.")
    if dry_run and task_ids:
        raise click.UsageError("--dry-run needs --tenant or --task-name; 'celery dq find' shows a task.")
    require_queue(queue, dq.queues)
    if in_advance and not dq.serves_queues():
        raise InvalidRequest("--in-advance needs tombstones, which this broker does not have; leave it out.")
    api = dq.queues[queue]
    if task_ids:
        # Other brokers have no tombstones.
        texts = dict(_OUTCOMES) if dq.serves_queues() else {**_OUTCOMES, "unknown": _NOT_HERE}

        def report(outcomes: dict[str, str]) -> tuple[dict[str, str], Sequence[str]]:
            lines = [f"{task_id}: {texts.get(each, each)}" for task_id, each in outcomes.items()]
            if "tombstone" in outcomes.values():
                ttl = format_duration(dq.options.tombstone_ttl_us)
                lines.append(f"A task that is not in {queue!r} will not run if it is published within {ttl}.")
            return outcomes, lines

        outcomes = change_each(
            as_json,
            task_ids,
            lambda task_id: _cancel_one(dq, queue, task_id, in_advance),
            report,
            word="cancelled",
            noun="task",
        )
        if not {*outcomes.values()} <= _CANCELLED:
            raise SystemExit(1)
        return
    name = task_name or ""
    whose = f"task {name!r}" if tenant is None else f"tenant {tenant!r}"
    app = click.get_current_context().obj.app

    def nothing() -> str:
        if tenant is not None:
            return unknown_tenant(dq, queue, tenant)
        return f"No task {name!r} is in {queue!r}.{nearest(name, app.tasks)}"

    change_many(
        as_json,
        partial(api.cancel_task_name, name) if tenant is None else partial(api.cancel_tenant, tenant),
        word="cancelled",
        question=f"Cancel {{}} of {whose} in {queue!r}?",
        dry_run=dry_run,
        yes=yes,
        nothing=nothing,
    )


_NOT_HERE = "unknown: it is not in the queue"
#: The text for each outcome of a cancellation.
_OUTCOMES = {
    "waiting": "cancelled; it was waiting",
    "delayed": "cancelled; it was waiting for its ETA",
    "discarded": "cancelled or expired already",
    "claimed": "claimed: a worker has it; use 'celery control revoke'",
    "dead": "dead: it is a dead letter; 'celery dq dead purge' removes it",
    "tombstone": "tombstone: it is not in the queue",
    "none": "none: it does not wait in the queue",
    "unknown": f"{_NOT_HERE}; --in-advance cancels it when it is published",
}
_CANCELLED = {"waiting", "delayed", "discarded", "tombstone"}


def _cancel_one(dq: DQ, queue: str, task_id: str, in_advance: bool) -> str:
    found = None if in_advance else dq.queues[queue].find(task_id)
    if found is not None and found.state == "dead":
        return "dead"
    if in_advance or found is not None:
        return dq.queues[queue].cancel(task_id)
    elsewhere = [found.queue for found in dq.find(task_id)]
    return f"unknown: it is in {elsewhere[0]!r}, not in {queue!r}" if elsewhere else "unknown"


@click.command()
@click.argument("task_id", required=False)
@click.option("--tenant", help="Explain a tenant instead of a task. Needs --queue.")
@click.option("--queue", help="Name of the queue.")
@command
def explain(dq: DQ, as_json: bool, task_id: str | None, tenant: str | None, queue: str | None) -> None:
    """Explain why a task or a tenant waits, and until when. Exit status 1: it is in no queue."""
    if (task_id is None) == (tenant is None):
        raise click.UsageError("Give either a TASK_ID, or --tenant together with --queue.")
    if tenant is not None and queue is None:
        raise click.UsageError("--tenant needs --queue.")
    if queue is not None:
        require_queue(queue, dq.queues)
    found = dq.explain(task_id=task_id, tenant=tenant, queue=queue)
    unknown = found.reason == "unknown"
    sentence = found.sentence
    if tenant is not None and queue is not None and found.reason == "empty":
        text = unknown_tenant(dq, queue, tenant)
        sentence, unknown = text or sentence, bool(text)
    show(as_json, found, sentence)
    if unknown:
        raise SystemExit(1)


@click.command()
@click.argument("task_id")
@click.option("--eta", type=time, help="When it is due, such as 2026-03-01T18:00; local time.")
@click.option("--countdown", type=duration, help="In which time it is due, such as 15m; 0 is at once.")
@command
def reschedule(
    dq: DQ, as_json: bool, task_id: str, eta: datetime | None, countdown: timedelta | None
) -> None:
    """Change when the waiting or delayed task TASK_ID is due. Exit status 1: it was not changed."""
    if (eta is None) == (countdown is None):
        raise click.UsageError("Give either --eta or --countdown.")
    seconds = None if countdown is None else countdown.total_seconds()
    _edit(dq, as_json, task_id, lambda queue: queue.reschedule(task_id, eta=eta, countdown=seconds))


@click.command()
@click.argument("task_id")
@click.argument("priority", type=click.IntRange(0, 9))
@command
def reprioritise(dq: DQ, as_json: bool, task_id: str, priority: int) -> None:
    """Change the priority of the waiting or delayed task TASK_ID. Exit status 1: it was not changed."""
    _edit(dq, as_json, task_id, lambda queue: queue.reprioritise(task_id, priority))


@click.command()
@click.argument("task_id")
@arguments_options
@command
def edit(dq: DQ, as_json: bool, task_id: str, args_: str | None, kwargs: str | None) -> None:
    """Change arguments of the task TASK_ID, which waits or is delayed. Exit status 1: it was not changed."""
    changes = read_arguments(args_, kwargs)
    if not changes:
        raise click.UsageError("Name --args, --kwargs or both.")
    _edit(dq, as_json, task_id, lambda queue: queue.edit(task_id, **changes))


def _edit(dq: DQ, as_json: bool, task_id: str, edit: Callable[[QueueApi], str]) -> None:
    """Edit a task in the queue that has it."""
    found = dq.find(task_id)
    places = {each.queue: edit(dq.queues[each.queue]) for each in found}
    changed = {queue: state for queue, state in places.items() if state in CHANGED}
    if not changed:
        where = ", ".join(f"{each.state} in {each.queue!r}" for each in found) or "in no queue"
        raise InvalidRequest(f"Task {task_id} was not changed: it is {where}.")
    text = ", ".join(f"{state} in {queue!r}" for queue, state in changed.items())
    show(as_json, changed, f"Task {task_id} is {text} now.")
