"""Checks of the outbox: whether its tables can be read, and whether their rows are relayed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from celery_dq.app.api.api import dq_of
from celery_dq.app.api.outbox import OutboxSnapshot
from celery_dq.app.checks.finding import Finding, reason_of

#: Age in seconds of a row above which no relay seems to run.
LATE_S = 60.0


def outboxes(app: Any) -> Iterator[Finding]:
    """Whether the rows of ``dq_outbox`` can be read and are relayed."""
    try:
        found = dq_of(app).outbox.inspect()
    except Exception as exc:  # of the settings, or of a module of the project
        yield Finding("E041", f"The outbox cannot be read: {reason_of(exc)}.", "Or leave dq_outbox out.")
        return
    yield from outbox_faults(found)
    for each in found:
        if each.is_up:
            yield Finding("I041", f"The outbox of database {each.database!r} can be read.")


def outbox_faults(found: Iterable[OutboxSnapshot]) -> Iterator[Finding]:
    """Whether rows cannot be read, are late, or were refused by the broker."""
    for each in found:
        if not each.is_up:
            yield Finding(
                "E041",
                f"The outbox of database {each.database!r} cannot be read: {each.error}.",
                f"Run manage.py migrate --database {each.database}, and see that the database answers.",
            )
        if each.oldest_s is not None and each.oldest_s > LATE_S:
            yield Finding(
                "W041",
                f"Rows wait in the outbox of database {each.database!r} ({each.rows}), the oldest for "
                f"{each.oldest_s:.0f} s.",
                "Start a worker of this app, which relays them, or see the logs of the workers; "
                "'celery dq leaders' shows which one relays.",
            )
        if each.refused:
            yield Finding(
                "W042",
                f"The broker refused rows of the outbox of database {each.database!r} ({each.refused}).",
                "Their column 'error' has the reason. Delete them, or set 'error' and 'producer' to '' to "
                "send them again.",
            )
