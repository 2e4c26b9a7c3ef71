"""The page that changes a dead letter and sends it again."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from django.http import QueryDict

from celery_dq.app.api.api import DQ
from celery_dq.contrib.django.dashboard.argument_forms import as_json, changed_arguments
from celery_dq.contrib.django.dashboard.letter_filter import hidden
from celery_dq.contrib.django.dashboard.messages import HIDDEN
from celery_dq.contrib.django.dashboard.times import duration_or_time
from celery_dq.contrib.django.dashboard.views import ChangeView, Confirmation, PageView, required
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.dead_letters import DeadLetterContent

__all__ = ["LetterEditView", "LetterView"]

#: The parts that the form has, in order.
PARTS = ("args", "kwargs", "tenant", "priority", "eta")


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


class LetterEditView(ChangeView):
    """Changes a dead letter and sends it again, after a preview of the differences."""

    permission = "edit_dead_letters"
    section = "dead-letters"

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

    def back(self, form: QueryDict) -> tuple[str, dict[str, str]]:
        """Return the dead letters of the queue."""
        return "dead-letters", {"queue": form.get("queue", "")}


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
        if given["priority"] not in tuple("0123456789"):
            raise InvalidRequest(f"priority = {given['priority'][:20]!r}: give a number from 0 to 9")
        changes["priority"] = int(given["priority"])
    if given["eta"] != before["eta"]:
        changes["eta"] = _eta(given["eta"])
    return changes


def _eta(text: str) -> datetime | None:
    if not text:
        return None
    found = duration_or_time("eta", text)
    return found if isinstance(found, datetime) else datetime.now(timezone.utc) + found
