"""Changes of a task that waits, and of a dead letter before it is sent again; arguments are JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from django.http import QueryDict

from celery_dq.app.api.api import DQ
from celery_dq.contrib.django.dashboard.dead_letters import DeadLettersChange, hidden
from celery_dq.contrib.django.dashboard.forms import duration_or_time
from celery_dq.contrib.django.dashboard.messages import HIDDEN, MessageChange
from celery_dq.contrib.django.dashboard.views import Confirmation, PageView, required
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.dead_letters import DeadLetterContent
from celery_dq.shown import plain

#: The fields of a form, in order.
ARGUMENTS = ("args", "kwargs")
#: Characters of JSON that a form takes for each of them.
LONGEST_JSON = 100_000


def as_json(value: Any) -> str:
    """Return arguments as a form has them; "" for those that cannot be read."""
    return "" if value is None else json.dumps(plain(value), ensure_ascii=False)


def changed_arguments(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a form that differ. An empty field leaves them as they are.

    Raises:
        InvalidRequest: A field is not JSON, or too long.
    """
    changes = {}
    for part in ARGUMENTS:
        text = given.get(part, "").strip()
        if text and (value := _read(part, text)) != plain(before[part]):
            changes[part] = value
    return changes


def _read(part: str, text: str) -> Any:
    if len(text) > LONGEST_JSON:
        raise InvalidRequest(f"{part}: the form takes {LONGEST_JSON} characters; use the command line")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"{part} = {text[:60]!r} is not JSON: {exc}") from None


def _priority(text: str) -> int:
    if text not in tuple("0123456789"):
        raise InvalidRequest(f"priority = {text[:20]!r}: give a number from 0 to 9")
    return int(text)


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
        priority = _priority(form.get("priority", ""))
        outcome = dq.queues[queue].reprioritise(task_id, priority)
        return self.outcome(queue, task_id, outcome, f"has priority {priority} now")


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


#: The parts of a dead letter's form, in order.
PARTS = (*ARGUMENTS, "tenant", "priority", "eta")


def _content(dq: DQ, given: QueryDict) -> DeadLetterContent:
    queue, message_id = required(given, "queue"), required(given, "id")
    content = dq.dead_letters[queue].show(message_id)
    if content is None:
        raise InvalidRequest(f"{queue!r} has no dead letter {message_id!r}")
    return content


def _values(content: DeadLetterContent) -> dict[str, str]:
    """Return the parts as the form has them; "" for arguments that cannot be read."""
    return {
        "args": as_json(content.args),
        "kwargs": as_json(content.kwargs),
        "tenant": content.letter.tenant,
        "priority": str(content.priority),
        "eta": "" if content.due is None else f"{content.due.astimezone(timezone.utc):%Y-%m-%dT%H:%M:%S}",
    }


class LetterView(PageView):
    """A dead letter in a form."""

    permission = "edit_dead_letters"
    page = "dead_letter"
    section = "dead-letters"

    def read(self, dq: DQ, given: QueryDict, *, arguments: bool) -> dict[str, Any]:
        """Read the dead letter; arguments are left out unless they may be shown."""
        content = _content(dq, given)
        values = _values(content)
        letter = content.letter
        if not arguments:
            letter = hidden(letter)
            values |= {"args": "", "kwargs": ""}
        return {"letter": letter, "expires": content.expires, "values": values}


class LetterEditView(DeadLettersChange):
    """Changes a dead letter and sends it again, after a preview of the differences."""

    permission = "edit_dead_letters"

    def preview(self, dq: DQ, form: QueryDict) -> Confirmation:
        """Return the parts of the message before and after."""
        content = _content(dq, form)
        before, changes = _values(content), _changes(content, form)
        if not changes:
            raise InvalidRequest("nothing was changed: 'Send again' sends the dead letter as it is")
        task, queue = content.letter.task or "The message", content.letter.queue
        is_hidden = {part for part in ("args", "kwargs") if not self.arguments}
        rows = [
            (
                part,
                (HIDDEN if part in is_hidden else before[part]) or "none",
                form.get(part, "").strip() or "none",
            )
            for part in PARTS
            if part in changes
        ]
        return Confirmation(
            title="Change the dead letter and send it again?",
            sentence=f"{task} goes to the end of {queue!r} and runs.",
            button="Change and send",
            columns=("", "now", "then"),
            rows=rows,
            fields={name: form.get(name, "") for name in ("queue", "id", *PARTS)},
        )

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Send the changed dead letter."""
        queue, message_id = required(form, "queue"), required(form, "id")
        new_id = dq.dead_letters[queue].edit(message_id, **_changes(_content(dq, form), form))
        return f"Dead letter {message_id} of {queue!r} was changed and sent again as {new_id}."


def _changes(content: DeadLetterContent, form: QueryDict) -> dict[str, Any]:
    """Return the parts of a form that differ from the dead letter. Empty arguments stay as they are.

    Raises:
        InvalidRequest: A part cannot be read.
    """
    before = _values(content)
    given = {part: form.get(part, before[part]).strip() for part in PARTS}
    changes = changed_arguments({"args": content.args, "kwargs": content.kwargs}, given)
    if given["tenant"] != before["tenant"]:
        changes["tenant"] = given["tenant"]
    if given["priority"] != before["priority"]:
        changes["priority"] = _priority(given["priority"])
    if given["eta"] != before["eta"]:
        changes["eta"] = _eta(given["eta"])
    return changes


def _eta(text: str) -> datetime | None:
    if not text:
        return None
    found = duration_or_time("eta", text)
    return found if isinstance(found, datetime) else datetime.now(timezone.utc) + found
