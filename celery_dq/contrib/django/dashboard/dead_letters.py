"""The page of dead letters, and their replay and deletion."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from django.http import QueryDict

from celery_dq.app.api.api import DQ
from celery_dq.contrib.django.dashboard.letter_filter import (
    LETTERS_PER_PAGE,
    LetterFilter,
    find_letters,
)
from celery_dq.contrib.django.dashboard.replays import preview_of_matching
from celery_dq.contrib.django.dashboard.views import ChangeView, Confirmation, PageView, required
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.dead_letters import DeadLetter
from celery_dq.inspector.messages import MessageSnapshot
from celery_dq.inspector.redis_values import check_text

__all__ = ["DeadLettersView", "PurgeView", "ReplayView"]

#: Dead letters that one change takes.
MOST_CHANGES = 200
#: Rows that a preview shows.
PREVIEW_ROWS = 10


def _offset(given: QueryDict) -> int:
    text = given.get("after", "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 8):
        raise InvalidRequest(f"after = {text!r}: give a whole number")
    return int(text)


class DeadLettersView(PageView):
    """The dead letters of one queue; without a queue, their number in each."""

    page = "dead_letters"
    section = "dead-letters"

    def read(self, dq: DQ, given: QueryDict, *, arguments: bool) -> dict[str, Any]:
        """Read a part of the dead letters, the latest first."""
        if not given.get("queue"):
            counts = {name: len(dq.dead_letters[name]) for name in dq.dead_letters}
            return {"counts": {name: number for name, number in counts.items() if number}}
        queue, after = required(given, "queue"), _offset(given)
        letters = dq.dead_letters[queue]
        wanted = LetterFilter.read(given)
        found, rank, more = find_letters(letters, wanted, after, LETTERS_PER_PAGE, arguments=arguments)
        return {
            "queue": queue,
            "total": len(letters),
            "letters": found,
            "looked_at": rank - after,
            "after": str(rank) if more else "",
        }


class LettersChange(ChangeView):
    """A change of the chosen dead letters, or of those that match the filter.

    The preview lists the ids, and the change affects these only, whatever comes meanwhile.
    """

    section = "dead-letters"
    title: ClassVar[str]
    effect: ClassVar[str]
    button: ClassVar[str]
    is_dangerous: ClassVar[bool]

    def preview(self, dq: DQ, form: QueryDict) -> Confirmation:
        """Return the dead letters that the change would affect."""
        queue = required(form, "queue")
        letters, more = dq.dead_letters[queue], ""
        found: list[DeadLetter | MessageSnapshot] = []
        if chosen := form.getlist("id")[:LETTERS_PER_PAGE]:
            places = [dq.queues[queue].find(check_text("id", each)) for each in chosen]
            found += [each for each in places if each is not None and each.state == "dead"]
        else:
            wanted = LetterFilter.read(form)
            matching, rank, others = find_letters(letters, wanted, 0, MOST_CHANGES, arguments=self.arguments)
            found += matching
            more = (
                f" Others may match: one change takes {MOST_CHANGES}, and looked at {rank}." if others else ""
            )
        if not found:
            raise InvalidRequest(f"no dead letter of {queue!r} was chosen, or matches the filter")
        return Confirmation(
            title=self.title.format(len(found)),
            sentence=f"{len(found)} of {len(letters)} dead letters of {queue!r} {self.effect}{more}",
            button=self.button.format(len(found)),
            columns=("id", "task", "tenant"),
            rows=[(each.id, each.task, each.tenant or "(none)") for each in found[:PREVIEW_ROWS]],
            count=len(found),
            fields={"queue": queue, "ids": json.dumps([each.id for each in found])},
            is_dangerous=self.is_dangerous,
        )

    def ids(self, form: QueryDict) -> list[str]:
        """Return the ids of the preview.

        Raises:
            InvalidRequest: The form has none, or too many.
        """
        try:
            ids = json.loads(form.get("ids", ""))
        except (ValueError, RecursionError):
            ids = None
        if not isinstance(ids, list) or not 0 < len(ids) <= MOST_CHANGES:
            raise InvalidRequest(f"ids: give a JSON list of 1 to {MOST_CHANGES} ids of dead letters")
        return [check_text("id", each) for each in ids]

    def back(self, form: QueryDict) -> tuple[str, dict[str, str]]:
        """Return the dead letters of the queue."""
        return "dead-letters", {"queue": form.get("queue", "")}


class ReplayView(LettersChange):
    """Sends the chosen dead letters again; those that match the filter are sent by :mod:`.replays`."""

    permission = "replay_dead_letters"
    title = "Send {} dead letters again?"
    effect = "go to the end of the queue, and run again."
    button = "Send {} again"
    is_dangerous = False

    def preview(self, dq: DQ, form: QueryDict) -> Confirmation:
        """Return the dead letters that would be sent; without a choice, with a rate to choose."""
        if form.getlist("id") or not dq.serves_queues():
            return super().preview(dq, form)
        return preview_of_matching(dq, form, arguments=self.arguments)

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Send the dead letters."""
        queue = required(form, "queue")
        ids = self.ids(form)
        sent = sum(dq.dead_letters[queue].replay(each) for each in ids)
        return f"{sent} of {len(ids)} dead letters of {queue!r} were sent again."


class PurgeView(LettersChange):
    """Deletes dead letters for good."""

    permission = "purge_dead_letters"
    title = "Delete {} dead letters?"
    effect = "are deleted for good. This cannot be undone."
    button = "Delete {}"
    is_dangerous = True

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Delete the dead letters."""
        queue = required(form, "queue")
        ids = self.ids(form)
        gone = sum(dq.dead_letters[queue].purge(each) for each in ids)
        return f"{gone} of {len(ids)} dead letters of {queue!r} were deleted."
