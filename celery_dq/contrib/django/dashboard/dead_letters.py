"""The page of dead letters, their replay and deletion; a change of one before it is sent again.

All that match a filter are replayed step by step. The page of the replay asks for one step after the other,
so that it shows the progress and a user can stop it. Nothing is kept between two steps: the fields of the
page's form hold all of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, ClassVar, Literal

from django.http import HttpResponseBase, QueryDict

from celery_dq.app.api.api import DQ
from celery_dq.app.api.redis_dead_letters import DeadLetters
from celery_dq.contrib.django.dashboard.forms import duration_or_time, time_before, whole_number
from celery_dq.contrib.django.dashboard.messages import (
    ARGUMENTS,
    HIDDEN,
    as_json,
    changed_arguments,
    read_priority,
    reason_without_text,
    without_arguments,
)
from celery_dq.contrib.django.dashboard.views import ChangeView, Confirmation, PageView, required
from celery_dq.duration import parse_rate
from celery_dq.errors import InvalidMessage, InvalidRequest
from celery_dq.inspector.dead_letters import DeadLetter, DeadLetterContent
from celery_dq.inspector.redis_values import check_text

#: Dead letters on one page.
LETTERS_PER_PAGE = 50
#: Dead letters that one request compares with the filter.
MOST_LOOKS = 2_000


@dataclass(frozen=True)
class LetterFilter:
    """The dead letters that a request asks for. A part that is empty allows all.

    Attributes:
        tenant: Name of the tenant.
        task: A part of the task's name.
        reason: A part of the reason.
        since: Earliest time; None for no limit.
        until: Latest time; None for no limit.
    """

    tenant: str | None
    task: str
    reason: str
    since: datetime | None
    until: datetime | None

    @classmethod
    def read(cls, given: QueryDict) -> LetterFilter:
        """Read the parameters.

        Raises:
            InvalidRequest: ``since`` or ``until`` is neither a time nor a duration before now.
        """
        return cls(
            given.get("tenant") or None,
            given.get("task", "").casefold(),
            given.get("reason", "").casefold(),
            time_before("since", given.get("since", "")),
            time_before("until", given.get("until", "")),
        )

    def __str__(self) -> str:
        """Return the parts but the tenant, for the audit stream."""
        times = (
            (name, at and f"{at:%Y-%m-%d %H:%M:%S}")
            for name, at in (("since", self.since), ("until", self.until))
        )
        parts = (("task", self.task), ("reason", self.reason), *times)
        return ", ".join(f"{name} {value}" for name, value in parts if value)

    def allows(self, letter: DeadLetter) -> bool:
        """Whether a dead letter is asked for."""
        return (
            self.tenant in (None, letter.tenant)
            and self.task in letter.task.casefold()
            and self.reason in letter.reason.casefold()
            and (self.since is None or (letter.at is not None and letter.at >= self.since))
            and (self.until is None or (letter.at is not None and letter.at <= self.until))
        )


def hidden(letter: DeadLetter) -> DeadLetter:
    """Return a dead letter without its arguments, and without the text of its exception."""
    return replace(without_arguments(letter), reason=reason_without_text(letter.reason))


def find_letters(
    letters: DeadLetters, wanted: LetterFilter, after: int, limit: int, *, arguments: bool
) -> tuple[list[DeadLetter], int, bool]:
    """Return up to `limit` dead letters from a rank on, the next rank, and whether others may follow.

    A search ends after :data:`MOST_LOOKS` dead letters. Without `arguments` these are hidden, and the filter
    sees the dead letters as the user does: its count would tell whether a guess is right.

    Raises:
        InvalidRequest: The filter names a tenant, and the broker has none.
    """
    letters.check_tenant_filter(wanted.tenant)
    found: list[DeadLetter] = []
    rank, end = after, after + MOST_LOOKS
    while rank < end:
        size = min(LETTERS_PER_PAGE, end - rank)
        part = letters.list(size, rank)
        for stored in part:
            letter = stored if arguments else hidden(stored)
            if wanted.allows(letter):
                if len(found) == limit:
                    return found, rank, True
                found.append(letter)
            rank += 1
        if len(part) < size:
            return found, rank, False
    return found, rank, True


def letters_to_change(
    letters: DeadLetters, form: QueryDict, limit: int, *, arguments: bool
) -> tuple[list[DeadLetter], int, bool]:
    """Return up to `limit` dead letters that match a form, how many were looked at, and whether others may.

    If none of the latest ones matches, the search goes on where the page with the form begins.

    Raises:
        InvalidRequest: None matches.
    """
    wanted = LetterFilter.read(form)
    found, looked_at, more = find_letters(letters, wanted, 0, limit, arguments=arguments)
    if more and not found:
        after = max(whole_number(form, "after"), looked_at)
        found, rank, more = find_letters(letters, wanted, after, limit, arguments=arguments)
        looked_at += rank - after
    if not found and more:
        raise InvalidRequest(
            f"none of the {looked_at} dead letters of {letters.name!r} that were looked at matches: "
            "go to the older ones, and send from there"
        )
    if not found:
        raise InvalidRequest(f"no dead letter of {letters.name!r} matches the filter")
    return found, looked_at, more


#: Seconds that a step takes at most, if a rate is given. A page waits three seconds for a change.
STEP_S = 2.0
#: Messages that a step sends at most.
MOST_SENT = 200


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
    # Dead letters that come during the replay are not sent. These are times of the server.
    times = (wanted.until, *(each.at for each in letters.list(1)))
    latest = min((each for each in times if each is not None), default=None)
    found, looked_at, others = letters_to_change(letters, form, MOST_LOOKS, arguments=arguments)
    count = f"At least {len(found)}" if others else str(len(found))
    total = len(letters)
    return Confirmation(
        title=f"Send {count.lower()} dead letters again?",
        sentence=(
            f"{count} of {total} dead letters of {queue!r} go to the end of the queue, the oldest first, and "
            "run again. The next page shows the progress and sends while it is open; it can be stopped."
            + (f" Only {looked_at} were looked at for this count." if others else "")
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
            "since": wanted.since.isoformat() if wanted.since else "",
            "until": latest.isoformat() if latest else "",
            "total": str(total),
        },
        rate_of="messages",
        page="replay-steps",
    )


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


class DeadLettersChange(ChangeView):
    """A change of dead letters, which shows those of the queue afterwards."""

    section = "dead-letters"
    follows = ("dead-letters", "queue")


class ReplayStepsView(DeadLettersChange):
    """Sends the next dead letters that match, and shows the progress."""

    permission = "replay_dead_letters"
    _progress: Progress

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Send the dead letters of one step."""
        queue, wanted, rate = required(form, "queue"), LetterFilter.read(form), rate_of(form)
        sent, looked_at = whole_number(form, "sent"), whole_number(form, "looked_at")
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
        total = max(whole_number(form, "total"), looked_at)
        self._progress = Progress(queue, sent, looked_at, total, rate, wait_ms, fields)
        return f"{part.sent} dead letters of {queue!r} were sent again."

    def done(self, form: QueryDict, sentence: str) -> HttpResponseBase:
        """Return the page of the progress."""
        return self.rendered("replay", {"progress": self._progress})


#: Dead letters that one change takes.
MOST_CHANGES = 200
#: Rows that a preview shows.
PREVIEW_ROWS = 10


class DeadLettersView(PageView):
    """The dead letters of one queue; without a queue, their number in each."""

    page = "dead_letters"
    section = "dead-letters"

    def read(self, dq: DQ, given: QueryDict, *, arguments: bool) -> dict[str, Any]:
        """Read a part of the dead letters, the latest first."""
        if not given.get("queue"):
            counts = dq.dead_letters.counts()
            return {"counts": {name: number for name, number in counts.items() if number}}
        queue, after = required(given, "queue"), whole_number(given, "after")
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


class LettersChange(DeadLettersChange):
    """A change of the chosen dead letters, or of those that match the filter.

    The preview lists the ids, and the change affects these only, whatever comes meanwhile.
    """

    #: The method of the dead letters that makes the change, and its result in words.
    action: ClassVar[Literal["replay", "purge"]]
    result: ClassVar[str]
    title: ClassVar[str]
    effect: ClassVar[str]
    button: ClassVar[str]
    is_dangerous: ClassVar[bool]

    def preview(self, dq: DQ, form: QueryDict) -> Confirmation:
        """Return the dead letters that the change would affect."""
        queue = required(form, "queue")
        letters, more = dq.dead_letters[queue], ""
        if chosen := form.getlist("id")[:LETTERS_PER_PAGE]:
            rows = [content.letter for each in chosen if (content := letters.show(each)) is not None]
        else:
            rows, looked_at, others = letters_to_change(letters, form, MOST_CHANGES, arguments=self.arguments)
            if others:
                more = f" Others may match: one change takes {MOST_CHANGES}, and looked at {looked_at}."
        if not rows:
            raise InvalidRequest(f"{queue!r} has none of the chosen dead letters any more")
        return Confirmation(
            title=self.title.format(len(rows)),
            sentence=f"{len(rows)} of {len(letters)} dead letters of {queue!r} {self.effect}{more}",
            button=self.button.format(len(rows)),
            columns=("id", "task", "tenant"),
            rows=[(each.id, each.task, each.tenant or "(none)") for each in rows[:PREVIEW_ROWS]],
            count=len(rows),
            fields={"queue": queue, "ids": json.dumps([each.id for each in rows])},
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

    def make(self, dq: DQ, form: QueryDict) -> str:
        """Change the dead letters of the preview."""
        queue, ids = required(form, "queue"), self.ids(form)
        letters, refusals = dq.dead_letters[queue], list[str]()
        count = sum(self._changed(letters, each, refusals) for each in ids)
        return f"{count} of {len(ids)} dead letters of {queue!r} were {self.result}.{''.join(refusals[:1])}"

    def _changed(self, letters: DeadLetters, message_id: str, refusals: list[str]) -> int:
        """Change a dead letter, and return their number. One that cannot be sent must not stop the others."""
        try:
            return int(getattr(letters, self.action)(message_id))
        except InvalidMessage as exc:
            refusals.append(f" {exc}.")
            return 0


class ReplayView(LettersChange):
    """Sends the chosen dead letters again; those that match the filter are sent by ``ReplayStepsView``."""

    permission = "replay_dead_letters"
    action, result = "replay", "sent again"
    title = "Send {} dead letters again?"
    effect = "go to the end of the queue, and run again."
    button = "Send {} again"
    is_dangerous = False

    def preview(self, dq: DQ, form: QueryDict) -> Confirmation:
        """Return the dead letters that would be sent; without a choice, with a rate to choose."""
        if form.getlist("id") or not dq.serves_queues():
            return super().preview(dq, form)
        return preview_of_matching(dq, form, arguments=self.arguments)


class PurgeView(LettersChange):
    """Deletes dead letters for good."""

    permission = "purge_dead_letters"
    action, result = "purge", "deleted"
    title = "Delete {} dead letters?"
    effect = "are deleted for good. This cannot be undone."
    button = "Delete {}"
    is_dangerous = True


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
        before, changes = _values(content), _changes(content, form, arguments=self.arguments)
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
        changes = _changes(_content(dq, form), form, arguments=self.arguments)
        new_id = dq.dead_letters[queue].edit(message_id, **changes)
        return f"Dead letter {message_id} of {queue!r} was changed and sent again as {new_id}."


def _changes(content: DeadLetterContent, form: QueryDict, *, arguments: bool) -> dict[str, Any]:
    """Return the parts of a form that differ from the dead letter, see :func:`changed_arguments`.

    Raises:
        InvalidRequest: A part cannot be read.
    """
    before = _values(content)
    # A tenant may begin or end with a blank. One that was not changed keeps it.
    given = {part: form.get(part, now) for part, now in before.items()}
    given = {part: text if text == before[part] else text.strip() for part, text in given.items()}
    present = {"args": content.args, "kwargs": content.kwargs}
    changes = changed_arguments(present, form.dict(), arguments=arguments)
    if given["tenant"] != before["tenant"]:
        changes["tenant"] = given["tenant"]
    if given["priority"] != before["priority"]:
        changes["priority"] = read_priority(given["priority"])
    if given["eta"] != before["eta"]:
        changes["eta"] = _eta(given["eta"])
    return changes


def _eta(text: str) -> datetime | None:
    if not text:
        return None
    found = duration_or_time("eta", text)
    return found if isinstance(found, datetime) else datetime.now(timezone.utc) + found
