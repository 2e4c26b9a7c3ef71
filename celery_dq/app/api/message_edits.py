"""Changes of a task that waits: its place, and its arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from celery_dq.app.api.task_body import shown_arguments, with_arguments
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.messages import Located, find_located
from celery_dq.inspector.redis_values import Client
from celery_dq.transport.message_record import MessageRecord
from celery_dq.transport.redis.store.partition import Edited, Partition
from celery_dq.transport.redis.store.script_calls import run_all
from celery_dq.transport.redis.store.whole_queue import likely_first

#: The states of a task whose arguments may change; an outcome that is one of them is a change.
CHANGED = ("waiting", "delayed", "blocked")
#: An outcome of a higher rank says more. An in-flight message, which is ``other``, may have another message
#: with its id that waits, of another tenant.
_RANKS: tuple[Edited, ...] = ("none", "other", "expires", "blocked", "delayed", "waiting")
#: How often a message is read again that was changed between its reading and its writing.
_TRIES = 3


class EditMessage(Protocol):
    """A change of one task in the partitions of its queue."""

    def __call__(self, partitions: Sequence[Partition], client: Client, task_id: str) -> Edited:
        """Make the change, and return the state of the task."""
        ...


def edit_place(partitions: Sequence[Partition], client: Client, task_id: str, **changes: int) -> Edited:
    """Change when a task is due, or its priority; `changes` as for :meth:`Partition.edit`.

    Raises:
        InvalidRequest: The task expires before it would be due.
    """
    # A partition without the task changes nothing.
    outcome: Edited = "none"
    for some in likely_first(partitions, task_id):
        if outcome in ("none", "other"):
            outcomes = run_all([partition.edit(task_id, **changes) for partition in some], client)
            outcome = max([outcome, *outcomes], key=_RANKS.index)
    if outcome == "expires":
        raise InvalidRequest(
            f"reschedule: task {task_id} expires before that, and would not run; give an earlier time"
        )
    return outcome


class Arguments(NamedTuple):
    """The arguments of a task; None for those that are not JSON."""

    args: Any
    kwargs: Any


def editable_arguments(partitions: Sequence[Partition], client: Client, task_id: str) -> Arguments | None:
    """Read the arguments of a task that waits."""
    found = _located(partitions, client, task_id)
    if found is None or found.message.state not in CHANGED:
        return None
    record = MessageRecord.unpack(found.record)
    return Arguments(*shown_arguments(record.envelope, record.body))


def edit_arguments(
    partitions: Sequence[Partition],
    client: Client,
    task_id: str,
    changes: Mapping[str, Any],
    accept: Collection[str],
    tasks: Mapping[str, Any],
) -> Edited:
    """Change ``args`` or ``kwargs`` of a task; `accept` and `tasks` as for :func:`with_arguments`.

    Raises:
        InvalidMessage: The body cannot be decoded or encoded, or the arguments do not fit the task.
    """
    for _ in range(_TRIES):
        found = _located(partitions, client, task_id)
        if found is None or found.message.state in ("dead", "cancelled"):
            return "none"
        message, _, before = found
        if message.state not in CHANGED:
            return "other"
        record = MessageRecord.unpack(before)
        packed, body = with_arguments(record.envelope, record.body, changes, accept, tasks)
        after = record._replace(envelope=packed, body=body).pack()
        call = partitions[message.partition].edit_record(task_id, before, after)
        outcome: Edited = call.run(client)
        if outcome in CHANGED:
            return outcome
    return "other"


def _located(partitions: Sequence[Partition], client: Client, task_id: str) -> Located | None:
    """Find the message of a task in a queue, one that waits before one that does not."""
    found: list[Located] = []
    for some in likely_first(partitions, task_id):
        found += find_located(some, client, task_id)
        if found and found[-1].message.state in CHANGED:
            return found[-1]
    return found[0] if found else None
