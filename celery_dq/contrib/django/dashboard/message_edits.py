"""Changes of a task that waits: when it is due, its priority, its arguments, its queue."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar

from django.http import QueryDict

from celery_dq.app.api.api import DQ
from celery_dq.contrib.django.dashboard.argument_forms import ARGUMENTS, as_json, changed_arguments
from celery_dq.contrib.django.dashboard.messages import HIDDEN
from celery_dq.contrib.django.dashboard.times import duration_or_time
from celery_dq.contrib.django.dashboard.views import ChangeView, Confirmation, PageView, required
from celery_dq.errors import InvalidRequest

__all__ = ["ArgumentsEditView", "ArgumentsView", "MoveView", "ReprioritiseView", "RescheduleView"]


class MessageChange(ChangeView):
    """A change of one waiting or delayed task, which shows the task afterwards."""

    permission = "edit_messages"
    _OUTCOMES: ClassVar[Mapping[str, str]] = {
        "other": "was not changed, because a worker has it, or it is cancelled, or waits for a dedup lock",
        "none": "was not changed, because it is not in this queue any more",
    }

    def named(self, form: QueryDict) -> tuple[str, str]:
        """Return queue and task of the form."""
        return required(form, "queue"), required(form, "id")

    def outcome(self, queue: str, task_id: str, outcome: str, done: str) -> str:
        """Return the sentence about an outcome; `done` is the one of a change."""
        return f"Task {task_id} in {queue!r} {self._OUTCOMES.get(outcome, done)}."

    def back(self, form: QueryDict) -> tuple[str, dict[str, str]]:
        """Return the page of the message."""
        return "message", {"id": form.get("id", "")}


class RescheduleView(MessageChange):
    """Changes when a task is due, at once: it can be changed again."""

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Reschedule the task."""
        queue, task_id = self.named(form)
        when = duration_or_time("due", required(form, "due"))
        if isinstance(when, datetime):
            outcome = dq.queues[queue].reschedule(task_id, eta=when)
        else:
            outcome = dq.queues[queue].reschedule(task_id, countdown=when.total_seconds())
        return self.outcome(queue, task_id, outcome, f"is {outcome} now")


class ReprioritiseView(MessageChange):
    """Changes the priority of a task, at once: it can be changed again."""

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Change the priority."""
        queue, task_id = self.named(form)
        text = form.get("priority", "")
        if text not in tuple("0123456789"):
            raise InvalidRequest(f"priority = {text[:20]!r}: give a number from 0 to 9")
        outcome = dq.queues[queue].reprioritise(task_id, int(text))
        return self.outcome(queue, task_id, outcome, f"has priority {text} now")


class ArgumentsView(PageView):
    """The arguments of a task that waits, in a form."""

    permission = "edit_messages"
    page = "message_edit"

    def read(self, dq: DQ, given: QueryDict, *, arguments: bool) -> dict[str, Any]:
        """Read the arguments; they are left out unless they may be shown."""
        queue, task_id, present = _present(dq, given)
        found = dq.queues[queue].find(task_id)
        return {
            "queue": queue,
            "id": task_id,
            "task": "" if found is None else found.task,
            "values": {part: as_json(present[part]) if arguments else "" for part in ARGUMENTS},
        }


def _present(dq: DQ, given: QueryDict) -> tuple[str, str, dict[str, Any]]:
    """Return queue, task and the present arguments."""
    queue, task_id = required(given, "queue"), required(given, "id")
    found = dq.queues[queue].arguments(task_id)
    if found is None:
        raise InvalidRequest(f"task {task_id} does not wait in {queue!r} any more, so it cannot be changed")
    return queue, task_id, found._asdict()


class ArgumentsEditView(MessageChange):
    """Changes the arguments of a task, after a preview of the differences."""

    def preview(self, dq: DQ, form: QueryDict) -> Confirmation:
        """Return the arguments before and after."""
        queue, task_id, present = _present(dq, form)
        changes = changed_arguments(present, form.dict())
        if not changes:
            raise InvalidRequest("nothing was changed: the task has these arguments already")
        return Confirmation(
            title="Change the arguments?",
            sentence=f"Task {task_id} keeps its place in {queue!r}, its tenant, and its dedup key.",
            button="Change the arguments",
            columns=("", "now", "then"),
            rows=[
                (part, as_json(present[part]) if self.arguments else HIDDEN, as_json(changes[part]))
                for part in changes
            ],
            # Another operator may change the other arguments meanwhile.
            fields={name: form.get(name, "") for name in ("queue", "id", *changes)},
        )

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Change the arguments."""
        queue, task_id, present = _present(dq, form)
        outcome = dq.queues[queue].edit(task_id, **changed_arguments(present, form.dict()))
        return self.outcome(queue, task_id, outcome, "has other arguments now")


class MoveView(MessageChange):
    """Moves a task to the end of another queue, after a confirmation."""

    def preview(self, dq: DQ, form: QueryDict) -> Confirmation:
        """Return the task and both queues."""
        queue, task_id = self.named(form)
        to = self._destination(dq, form)
        found = dq.queues[queue].find(task_id)
        return Confirmation(
            title="Move the task?",
            sentence=f"Task {task_id} goes to the end of {to!r}, where the quotas of that queue hold.",
            button="Move the task",
            columns=("task", "tenant", "from", "to"),
            rows=[] if found is None else [(found.task, found.tenant or "(none)", queue, to)],
            fields={"queue": queue, "id": task_id, "to": to},
        )

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Move the task."""
        queue, task_id = self.named(form)
        to = self._destination(dq, form)
        # A move also completes an interrupted one, of other tasks.
        is_moved = dq.queues[queue].move(to, task_id=task_id) > 0 and dq.queues[queue].find(task_id) is None
        return self.outcome(queue, task_id, "" if is_moved else "other", f"was moved to {to!r}")

    def _destination(self, dq: DQ, form: QueryDict) -> str:
        """Return the queue that gets the task. A new queue is refused: no worker would consume it."""
        to = required(form, "to").strip()
        if to not in dq.queues:
            raise InvalidRequest(f"to = {to!r}: there is no such queue")
        return to
