"""The page of dead letters, and their replay and deletion."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any, ClassVar

from django.http import QueryDict

from celery_dq.app.api.api import DQ
from celery_dq.app.api.redis_dead_letters import DeadLetters
from celery_dq.contrib.django.dashboard.messages import reason_without_text, without_arguments
from celery_dq.contrib.django.dashboard.views import ChangeView, Confirmation, PageView, required
from celery_dq.duration import parse_duration
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.dead_letters import DeadLetter
from celery_dq.inspector.messages import MessageSnapshot
from celery_dq.inspector.redis_values import check_text

__all__ = ["DeadLettersView", "PurgeView", "ReplayView"]

#: Dead letters on one page.
LETTERS_PER_PAGE = 50
#: Dead letters that one request compares with the filter.
MOST_LOOKS = 2_000
#: Dead letters that one change takes.
MOST_CHANGES = 200
#: Rows that a preview shows.
PREVIEW_ROWS = 10


@dataclass(frozen=True)
class LetterFilter:
    """The dead letters that a request asks for. A part that is empty allows all.

    Attributes:
        tenant: Name of the tenant.
        task: A part of the task's name.
        reason: A part of the reason.
        since: Earliest time; None for no limit.
    """

    tenant: str | None
    task: str
    reason: str
    since: datetime | None

    @classmethod
    def read(cls, given: QueryDict) -> LetterFilter:
        """Read the parameters.

        Raises:
            InvalidRequest: ``since`` is no duration, or too long.
        """
        since = given.get("since", "").strip()
        return cls(
            given.get("tenant") or None,
            given.get("task", "").casefold(),
            given.get("reason", "").casefold(),
            _ago(since) if since else None,
        )

    def allows(self, letter: DeadLetter) -> bool:
        """Whether a dead letter is asked for."""
        return (
            self.tenant in (None, letter.tenant)
            and self.task in letter.task.casefold()
            and self.reason in letter.reason.casefold()
            and (self.since is None or (letter.at is not None and letter.at >= self.since))
        )


def _ago(text: str) -> datetime:
    try:
        return datetime.now(timezone.utc) - timedelta(microseconds=parse_duration(text[:40], option="since"))
    except ValueError as exc:
        raise InvalidRequest(str(exc)) from None
    except OverflowError:
        raise InvalidRequest(f"since = {text[:40]!r}: give a shorter time, such as 365d") from None


def _offset(given: QueryDict) -> int:
    text = given.get("after", "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 8):
        raise InvalidRequest(f"after = {text!r}: give a whole number")
    return int(text)


def _hidden(letter: DeadLetter) -> DeadLetter:
    return replace(without_arguments(letter), reason=reason_without_text(letter.reason))


def find_letters(
    letters: DeadLetters, wanted: LetterFilter, after: int, limit: int, *, arguments: bool
) -> tuple[list[DeadLetter], int, bool]:
    """Return up to `limit` dead letters from a rank on, the next rank, and whether others may follow.

    A search ends after :data:`MOST_LOOKS` dead letters. Without `arguments` these are hidden, and the filter
    sees the dead letters as the user does: its count would tell whether a guess is right.
    """
    found: list[DeadLetter] = []
    rank, end = after, after + MOST_LOOKS
    while rank < end:
        part = letters.list(min(LETTERS_PER_PAGE, end - rank), rank)
        for each in part:
            letter = each if arguments else _hidden(each)
            if wanted.allows(letter):
                if len(found) == limit:
                    return found, rank, True
                found.append(letter)
            rank += 1
        if len(part) < LETTERS_PER_PAGE:
            return found, rank, False
    return found, rank, True


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
    """Sends dead letters again."""

    permission = "replay_dead_letters"
    title = "Send {} dead letters again?"
    effect = "go to the end of the queue, and run again."
    button = "Send {} again"
    is_dangerous = False

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
