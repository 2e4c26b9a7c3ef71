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
    except Exception as exc:  # the driver of a database has errors of its own
        aliases = dq_of(app).options.outbox.aliases
        yield Finding(
            "E041",
            f"The rows of dq_outbox = {aliases!r} cannot be read: {reason_of(exc)}.",
            "Run manage.py migrate for each of these databases, and see that they answer.",
        )
        return
    yield from unsent_rows(found)
    for each in found:
        yield Finding("I041", f"The outbox of database {each.database!r} can be read.")


def unsent_rows(found: Iterable[OutboxSnapshot]) -> Iterator[Finding]:
    """Whether rows are late, or refused by the broker."""
    for each in found:
        if each.oldest_s > LATE_S:
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
