"""Look at queues and messages, and take messages back."""

from __future__ import annotations

import click

from celery_dq.app.face import DQ
from celery_dq.cli.output import command, show, show_table

_QUEUE_COLUMNS = ("name", "waiting", "delayed", "held", "discards", "dead", "limited", "paused", "consumers")
_MESSAGE_COLUMNS = ("id", "queue", "state", "task", "tenant", "priority", "due", "args", "consumer")


@click.command()
@click.argument("names", nargs=-1)
@command
def queues(dq: DQ, as_json: bool, names: tuple[str, ...]) -> None:
    """How the queues stand (default: all)."""
    rows = [dq.queues[name].snapshot() for name in names or dq.queues]
    show_table(as_json, rows, _QUEUE_COLUMNS, "No queue is declared yet.")


@click.command()
@click.argument("queue")
@click.option("--limit", default=50, show_default=True, help="Tenants to show.")
@command
def tenants(dq: DQ, as_json: bool, queue: str, limit: int) -> None:
    """The tenants with a backlog in QUEUE, next one served first."""
    columns = ("tenant", "state", "waiting", "running", "until", "quota")
    show_table(as_json, dq.queues[queue].tenants(limit), columns, f"No tenant has a backlog in {queue!r}.")


@click.command()
@click.argument("queue")
@click.option("--limit", default=10, show_default=True, help="Messages to show.")
@click.option("--tenant", help="Only of this tenant.")
@click.option("--delayed", is_flag=True, help="What waits for its ETA.")
@command
def peek(dq: DQ, as_json: bool, queue: str, limit: int, tenant: str | None, delayed: bool) -> None:
    """What waits next in QUEUE, without taking it."""
    rows = dq.queues[queue].peek(limit, tenant=tenant, delayed=delayed)
    show_table(as_json, rows, _MESSAGE_COLUMNS, f"Nothing waits in {queue!r}.")


@click.command()
@click.argument("task_id")
@command
def find(dq: DQ, as_json: bool, task_id: str) -> None:
    """Where the task TASK_ID is."""
    rows = dq.find(task_id)
    show_table(as_json, rows, _MESSAGE_COLUMNS, f"Task {task_id} is in no queue.")


@click.command()
@click.argument("queue")
@click.argument("task_ids", nargs=-1)
@click.option("--tenant", help="All of this tenant.")
@click.option("--task-name", help="All of this task.")
@command
def cancel(
    dq: DQ, as_json: bool, queue: str, task_ids: tuple[str, ...], tenant: str | None, task_name: str | None
) -> None:
    """Cancel in QUEUE the tasks TASK_IDS, or all of a tenant or of a task name."""
    face = dq.queues[queue]
    if sum((bool(task_ids), tenant is not None, task_name is not None)) != 1:
        raise click.UsageError("Say what to cancel: TASK_IDS, --tenant or --task-name, one of them.")
    if task_ids:
        outcomes = {task_id: face.cancel(task_id) for task_id in task_ids}
        show(as_json, outcomes, "\n".join(f"{task_id}: {outcome}" for task_id, outcome in outcomes.items()))
        return
    count = face.cancel_tenant(tenant) if tenant is not None else face.cancel_task_name(task_name or "")
    show(as_json, {"cancelled": count}, f"Cancelled {count}.")


@click.command()
@click.argument("queue")
@click.argument("to")
@click.option("--task-id", help="This task.")
@click.option("--tenant", help="All that waits for this tenant.")
@command
def move(dq: DQ, as_json: bool, queue: str, to: str, task_id: str | None, tenant: str | None) -> None:
    """Move a task, or all of a tenant, from QUEUE to the end of the queue TO."""
    count = dq.queues[queue].move(to, task_id=task_id, tenant=tenant)
    show(as_json, {"moved": count}, f"Moved {count} to {to!r}.")


@click.command()
@click.argument("queue")
@click.option("--force", "-f", is_flag=True, help="Do not ask.")
@command
def purge(dq: DQ, as_json: bool, queue: str, force: bool) -> None:
    """Remove all that waits or is delayed in QUEUE. What workers have stays."""
    if not force:
        click.confirm(f"Remove {dq.queues[queue].depth} messages for good?", abort=True, err=True)
    count = dq.queues[queue].purge()
    show(as_json, {"purged": count}, f"Purged {count}.")


@click.command()
@click.argument("task_id", required=False)
@click.option("--tenant", help="Instead of a task: whose work. Needs --queue.")
@click.option("--queue", help="Which queue.")
@command
def explain(dq: DQ, as_json: bool, task_id: str | None, tenant: str | None, queue: str | None) -> None:
    """Why a task, or a tenant, is waiting, and until when."""
    found = dq.explain(task_id=task_id, tenant=tenant, queue=queue)
    show(as_json, found, found.sentence)
