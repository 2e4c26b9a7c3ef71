"""The scheduler that the elected beat wraps: the run times of its entries, and the stamps of their ticks."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

from celery.schedules import schedule as interval
from celery.utils.imports import load_extension_class_names, symbol_by_name

from celery_dq.beat.schedule_store import LastRun
from celery_dq.errors import ConfigurationError

#: How far in the future the last run of an entry with fixed times (a crontab) may be. The clocks of machines
#: differ, and to accept only an earlier time would repeat a run.
CLOCK_DIFFERENCE = timedelta(seconds=60)
#: The namespace of the UUIDs of ticks.
NAMESPACE = uuid.UUID("5f0f3a60-7b1c-4b1e-9d0e-2f6a3f1f8f11")
#: Milliseconds for which the broker keeps the number of an entry's last tick. A beat that was stopped while
#: it sent this tick may continue so much later. Without a limit, markers of deleted entries would stay.
MARKER_TTL_MS = 7 * 24 * 3_600_000


class StaleEntry(Exception):
    """The wrapped scheduler considers an entry due because it has not read the entry's last run.

    Args:
        name: Name of the entry.
        ran: Its last run.
    """

    def __init__(self, name: str, ran: LastRun) -> None:
        super().__init__(name)
        self.name = name
        self.ran = ran


class Due(NamedTuple):
    """An entry whose tick has a number.

    Attributes:
        entry: The entry.
        before: Its last run before the tick.
        following: The entry after the tick, for the wrapped scheduler.
        number: Number of the tick.
    """

    entry: Any
    before: LastRun
    following: Any
    number: int


def wrapped_class(name: str) -> Any:
    """Return the class that ``dq_beat_scheduler`` names.

    Raises:
        ConfigurationError: The scheduler cannot be wrapped.
    """
    aliases: Any = load_extension_class_names("celery.beat_schedulers")
    kind: Any = symbol_by_name(name, aliases=dict(aliases))
    if any(base.__module__.partition(".")[0] == "redbeat" for base in kind.__mro__):
        raise ConfigurationError(
            f"dq_beat_scheduler = {name!r} cannot be wrapped: RedBeat elects a leader with its own lock, and "
            "counts an entry as run before it is sent. Use RedBeat alone (celery beat -S "
            "redbeat.RedBeatScheduler), or set dq_beat_scheduler to 'celery.beat:Scheduler' or 'django'"
        )
    return kind


def last_run(entry: Any) -> LastRun:
    """Return the last run of an entry."""
    return LastRun(entry.last_run_at, int(entry.total_run_count or 0))


def set_last_run(entry: Any, ran: LastRun) -> None:
    """Set the last run of an entry.

    An entry of django-celery-beat also has these values in its database row, and only the row is saved.
    """
    entry.last_run_at, entry.total_run_count = ran
    model = getattr(entry, "model", None)
    if model is not None:
        model.last_run_at, model.total_run_count = ran


def latest_run(entry: Any, wall: float) -> datetime:
    """Return the latest plausible last run of an entry.

    An interval counts from the last run. With a last run in the future, the entry would wait until the local
    clock has reached that time.

    Args:
        entry: The entry.
        wall: The current time, seconds since 1970.
    """
    now = datetime.fromtimestamp(wall, timezone.utc)
    latest = now if isinstance(entry.schedule, interval) else now + CLOCK_DIFFERENCE
    return latest if entry.last_run_at.tzinfo is not None else latest.replace(tzinfo=None)


def task_id_of(environment: str, entry_key: str, number: int) -> str:
    """Return the task id of tick `number` of an entry."""
    return str(uuid.uuid5(NAMESPACE, f"{environment}/{entry_key}/{number}"))


class TickStamps(dict[str, Any]):
    """A mapping with the same stamp for every queue, so that any route of the message finds it.

    Args:
        entry_key: The producer sequence of the entry.
        number: Number of the tick.
        task_id: The task id of the tick.
    """

    def __init__(self, entry_key: str, number: int, task_id: str) -> None:
        super().__init__()
        self._stamp = (entry_key, number, task_id, MARKER_TTL_MS)

    def get(self, queue: str, default: Any = None) -> Any:
        """Return the stamp, for any `queue`."""
        return self._stamp
