"""The dead letters that a request asks for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from django.http import QueryDict

from celery_dq.app.api.redis_dead_letters import DeadLetters
from celery_dq.contrib.django.dashboard.messages import reason_without_text, without_arguments
from celery_dq.contrib.django.dashboard.times import time_before
from celery_dq.inspector.dead_letters import DeadLetter

__all__ = ["LETTERS_PER_PAGE", "MOST_LOOKS", "LetterFilter", "find_letters", "hidden"]

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
        part = letters.list(min(LETTERS_PER_PAGE, end - rank), rank)
        for each in part:
            letter = each if arguments else hidden(each)
            if wanted.allows(letter):
                if len(found) == limit:
                    return found, rank, True
                found.append(letter)
            rank += 1
        if len(part) < LETTERS_PER_PAGE:
            return found, rank, False
    return found, rank, True
