"""A replay of all dead letters that match a filter, step by step: its preview, progress, and end.

The page of the replay asks for one step after the other, so that it shows the progress and a user can stop
it. Nothing is kept between two steps: the fields of the page's form hold all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.http import HttpResponseBase, QueryDict

from celery_dq.app.api.api import DQ
from celery_dq.contrib.django.dashboard.letter_filter import MOST_LOOKS, LetterFilter, find_letters, hidden
from celery_dq.contrib.django.dashboard.views import ChangeView, Confirmation, required
from celery_dq.duration import parse_rate
from celery_dq.errors import InvalidRequest

__all__ = ["ReplayStepsView", "preview_of_matching"]

#: Seconds that a step takes at most, if a rate is given. A page waits three seconds for a change.
STEP_S = 2.0
#: Messages that a step sends at most.
MOST_SENT = 200
#: Rows that a preview shows.
PREVIEW_ROWS = 10


@dataclass(frozen=True)
class Progress:
    """A replay after a step.

    Attributes:
        queue: Name of the queue.
        sent: Number of messages that were sent again.
        looked_at: Number of dead letters that were compared with the filter.
        total: Number of dead letters before the first step.
        rate: Messages per second, at most; None for as fast as possible.
        wait_ms: Milliseconds until the next step; None after the last one.
        fields: The fields of the form of the next step.
    """

    queue: str
    sent: int
    looked_at: int
    total: int
    rate: float | None
    wait_ms: int | None
    fields: dict[str, str]


def preview_of_matching(dq: DQ, form: QueryDict, *, arguments: bool) -> Confirmation:
    """Return the question whether to send the dead letters that match the filter.

    Raises:
        InvalidRequest: None matches.
    """
    queue, wanted = required(form, "queue"), LetterFilter.read(form)
    letters = dq.dead_letters[queue]
    found, looked_at, others = find_letters(letters, wanted, 0, MOST_LOOKS, arguments=arguments)
    if not found:
        raise InvalidRequest(f"no dead letter of {queue!r} matches the filter")
    # Dead letters that come during the replay are not sent. This is the time of the server.
    latest = max((each.at for each in found if each.at is not None), default=None)
    count = f"At least {len(found)}" if others else str(len(found))
    total = len(letters)
    return Confirmation(
        title=f"Send {count.lower()} dead letters again?",
        sentence=(
            f"{count} of {total} dead letters of {queue!r} go to the end of the queue, the oldest first, and "
            "run again. The next page shows the progress and sends while it is open; it can be stopped."
            + (f" Only the latest {looked_at} were counted." if others else "")
        ),
        button="Send them again",
        columns=("id", "task", "tenant"),
        rows=[(each.id, each.task, each.tenant or "(none)") for each in found[:PREVIEW_ROWS]],
        count=len(found),
        fields={
            "queue": queue,
            "tenant": form.get("tenant", ""),
            "task": form.get("task", ""),
            "reason": form.get("reason", ""),
            "since": _spelled(wanted.since),
            "until": _spelled(latest),
            "total": str(total),
        },
        rate_of="messages",
        page="replay-steps",
    )


def _spelled(at: datetime | None) -> str:
    return "" if at is None else at.isoformat()


def rate_of(form: QueryDict) -> float | None:
    """Return the messages per second that the form asks for; None for as many as possible."""
    text = form.get("rate", "").strip()[:40]
    if not text:
        return None
    given = float(text) if text.replace(".", "", 1).isdecimal() else text
    try:
        return parse_rate(given, option="rate", instead="leave it empty for as fast as possible")
    except ValueError as exc:
        raise InvalidRequest(str(exc)) from None


def _whole(form: QueryDict, name: str) -> int:
    text = form.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 12):
        raise InvalidRequest(f"{name} = {text[:20]!r}: give a whole number")
    return int(text)


class ReplayStepsView(ChangeView):
    """Sends the next dead letters that match, and shows the progress."""

    permission = "replay_dead_letters"
    section = "dead-letters"
    _progress: Progress

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Send the dead letters of one step."""
        queue, wanted, rate = required(form, "queue"), LetterFilter.read(form), rate_of(form)
        sent, looked_at = _whole(form, "sent"), _whole(form, "looked_at")
        limit = MOST_SENT if rate is None else min(max(int(rate * STEP_S), 1), MOST_SENT)
        arguments = self.arguments
        part = dq.dead_letters[queue].replay_part(
            lambda letter: wanted.allows(letter if arguments else hidden(letter)),
            form.get("after", ""),
            limit=limit,
            rate=rate,
            described=str(wanted),
            tenant=wanted.tenant,
            continues=form.get("audit_entry", ""),
        )
        fields: dict[str, Any] = {name: form.get(name, "") for name in form if name != "csrfmiddlewaretoken"}
        sent, looked_at = sent + part.sent, looked_at + part.looked_at
        fields |= {
            "after": part.after,
            "sent": str(sent),
            "looked_at": str(looked_at),
            "audit_entry": part.entry_id,
        }
        # A step that has sent nothing needs no pause.
        pause_ms = round(1000 / rate) if rate is not None and part.sent else 0
        wait_ms = pause_ms if part.after else None
        total = max(_whole(form, "total"), looked_at)
        self._progress = Progress(queue, sent, looked_at, total, rate, wait_ms, fields)
        return f"{part.sent} dead letters of {queue!r} were sent again."

    def done(self, form: QueryDict, sentence: str) -> HttpResponseBase:
        """Return the page of the progress."""
        return self.rendered("replay", {"progress": self._progress})

    def back(self, form: QueryDict) -> tuple[str, dict[str, str]]:
        """Return the dead letters of the queue."""
        return "dead-letters", {"queue": form.get("queue", "")}
