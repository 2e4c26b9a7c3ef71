"""The page of a message; its cancellation, changes of a task that waits. Arguments are JSON in forms."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, ClassVar, TypeVar

from django.http import QueryDict

from celery_dq.app.api.api import DQ
from celery_dq.contrib.django.dashboard.forms import duration_or_time
from celery_dq.contrib.django.dashboard.views import ChangeView, Confirmation, PageView, required
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.dead_letters import DeadLetter
from celery_dq.inspector.explain import explain_state, explain_unknown
from celery_dq.inspector.messages import UNREADABLE, MessageDetails, MessageSnapshot
from celery_dq.shown import plain

WithArguments = TypeVar("WithArguments", MessageSnapshot, DeadLetter)

#: Headers that Celery writes, with no value of the application in them. Other headers may hold secrets.
KNOWN_HEADERS = {
    *("id", "task", "lang", "root_id", "parent_id", "group", "group_index", "retries", "eta", "expires"),
    *("timelimit", "origin", "ignore_result", "replaced_task_nesting"),
}
#: The text instead of a hidden value.
HIDDEN = "(hidden)"


def shown(messages: Iterable[MessageSnapshot], arguments: bool) -> list[MessageSnapshot]:
    """Return messages, without their arguments unless these may be shown."""
    return [each if arguments else without_arguments(each) for each in messages]


def without_arguments(message: WithArguments) -> WithArguments:
    """Return a message or a dead letter without its arguments, or with the word that it cannot be read."""
    hidden = UNREADABLE if message.args.startswith(f"{UNREADABLE}: ") else HIDDEN
    return replace(message, args=hidden if message.args else "", kwargs=HIDDEN if message.kwargs else "")


def reason_without_text(reason: str) -> str:
    """Return a reason up to the type of its exception, whose text may hold arguments."""
    kind, _, exception = reason.partition(": ")
    exception_type, text, _ = exception.partition(":")
    return f"{kind}: {exception_type}" if text and exception_type.isidentifier() else kind


@dataclass(frozen=True)
class Moment:
    """A point of a timeline.

    Attributes:
        at: The time.
        event: What happens then.
        is_ahead: Whether it is in the future.
    """

    at: datetime
    event: str
    is_ahead: bool


class MessageView(PageView):
    """A task in all queues that have it: state, explanation, times, headers."""

    page = "message"

    def read(self, dq: DQ, given: QueryDict, *, arguments: bool) -> dict[str, Any]:
        """Look for the task in all queues."""
        task_id = required(given, "id").strip()
        places, everywhere = [], dq.find(task_id)
        for found in everywhere:
            details = dq.queues[found.queue].details(task_id)
            places.append(_place(details or MessageDetails(found), arguments))
        if dq.serves_queues():
            explanation = dq.explain(task_id=task_id, queue=everywhere[0].queue if everywhere else None)
        elif everywhere:
            explanation = explain_state(everywhere[0])
        else:
            explanation = explain_unknown(task_id, list(dq.queues))
        return {"id": task_id, "explanation": explanation, "places": places}


def _place(details: MessageDetails, arguments: bool) -> dict[str, Any]:
    message = details.message
    if not arguments:
        message = without_arguments(message)
        details = replace(details, reason=reason_without_text(details.reason))
    return {
        "message": message,
        "headers": details.headers if arguments else _known(details.headers),
        "content_type": details.content_type,
        "body_bytes": details.body_bytes,
        "reason": details.reason,
        "timeline": _timeline(details),
        "can_be_cancelled": message.state in ("waiting", "delayed", "blocked"),
        "can_be_edited": message.state in ("waiting", "delayed"),
    }


def _known(headers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if name in KNOWN_HEADERS else HIDDEN for name, value in headers.items()}


def _timeline(details: MessageDetails) -> list[Moment]:
    message, now = details.message, datetime.now(timezone.utc)
    states = {
        "claimed": f"claimed by {message.consumer}" if message.consumer else "claimed",
        "settled": f"started on {message.consumer}" if message.consumer else "started",
        "dead": f"became a dead letter ({details.reason or 'unknown'})",
    }
    known = (
        (details.in_line_since, "in line"),
        (message.due, "ETA"),
        (details.since, states.get(message.state, message.state)),
        (message.expires, "expires"),
    )
    return [Moment(at, event, at > now) for at, event in sorted((a, e) for a, e in known if a is not None)]


class MessageChange(ChangeView):
    """A change of one task, by default a waiting or delayed one, which shows the task afterwards."""

    permission = "edit_messages"
    follows = ("message", "id")
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


class CancelView(MessageChange):
    """Cancels a task that waits."""

    permission = "cancel_messages"
    _OUTCOMES: ClassVar[Mapping[str, str]] = {
        "waiting": "is cancelled; it was waiting",
        "delayed": "is cancelled; it was waiting for its ETA",
        "discarded": "was cancelled or had expired before",
        "claimed": "was not cancelled, because a worker has it: use 'celery control revoke'",
        "tombstone": "is not in this queue any more; if it is published again soon, it will not run",
        "none": "was not cancelled, because it does not wait in this queue",
    }

    def preview(self, dq: DQ, form: QueryDict) -> Confirmation:
        """Return the task."""
        queue, task_id = self.named(form)
        found = dq.queues[queue].find(task_id)
        rows = [] if found is None else [(found.task, found.tenant or "(none)", found.state)]
        return Confirmation(
            title="Cancel the task?",
            sentence=f"Task {task_id} in {queue!r} will not run. This cannot be undone.",
            button="Cancel the task",
            columns=("task", "tenant", "state"),
            rows=rows,
            fields={"queue": queue, "id": task_id},
            is_dangerous=True,
        )

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Cancel the task."""
        queue, task_id = self.named(form)
        outcome = dq.queues[queue].cancel(task_id)
        return self.outcome(queue, task_id, outcome, outcome)


#: The fields of a form, in order.
ARGUMENTS = ("args", "kwargs")
#: Characters of JSON that a form takes for each of them.
LONGEST_JSON = 100_000


def as_json(value: Any) -> str:
    """Return arguments as a form has them; "" for those that cannot be read."""
    return "" if value is None else json.dumps(plain(value), ensure_ascii=False)


def changed_arguments(
    before: Mapping[str, Any], given: Mapping[str, Any], *, arguments: bool
) -> dict[str, Any]:
    """Return the arguments of a form that differ. An empty field leaves them as they are.

    Args:
        before: The present arguments.
        given: The form.
        arguments: Whether the user may see them. If not, each given one counts as different: the answer would
            tell whether a guess is right.

    Raises:
        InvalidRequest: A field is not JSON, or too long.
    """
    changes = {}
    for part in ARGUMENTS:
        text = given.get(part, "").strip()
        if text and ((value := _read(part, text)) != plain(before[part]) or not arguments):
            changes[part] = value
    return changes


def _read(part: str, text: str) -> Any:
    if len(text) > LONGEST_JSON:
        raise InvalidRequest(f"{part}: the form takes {LONGEST_JSON} characters; use the command line")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"{part} = {text[:60]!r} is not JSON: {exc}") from None


def read_priority(text: str) -> int:
    """Return the priority of a form.

    Raises:
        InvalidRequest: It is not a number from 0 to 9.
    """
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
        priority = read_priority(form.get("priority", ""))
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
        changes = changed_arguments(present, form.dict(), arguments=self.arguments)
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
        changes = changed_arguments(present, form.dict(), arguments=self.arguments)
        outcome = dq.queues[queue].edit(task_id, **changes)
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
