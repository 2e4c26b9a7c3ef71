"""The page of a message, and its cancellation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, ClassVar, TypeVar

from django.http import QueryDict

from celery_dq.app.api.api import DQ
from celery_dq.contrib.django.dashboard.views import ChangeView, Confirmation, PageView, required
from celery_dq.inspector.dead_letters import DeadLetter
from celery_dq.inspector.explain import explain_state, explain_unknown
from celery_dq.inspector.messages import UNREADABLE, MessageDetails, MessageSnapshot

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
