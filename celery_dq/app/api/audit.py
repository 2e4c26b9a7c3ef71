"""``app.dq.audit``: who changed queues and quotas, and when; the progress of a change.

Every change that a person makes through ``app.dq``, ``celery dq`` or another door is one entry of a stream in
Redis, one stream per environment. It names no arguments, bodies or dedup keys of messages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timezone
from getpass import getuser
from socket import gethostname
from typing import Any, TypeAlias

import redis

from celery_dq.errors import DQError, InvalidRequest
from celery_dq.inspector.redis_values import (
    CHUNK,
    Client,
    bounded_us,
    check_count,
    check_text,
    moment,
    number,
    text,
)
from celery_dq.keys import audit_stream
from celery_dq.options import Options
from celery_dq.shown import shown_logger

logger = shown_logger(__name__)

#: Entries that the stream keeps, about: Redis removes the oldest ones in blocks. They take some 2 MB.
MAX_ENTRIES = 10_000
#: End of the details of an entry whose change may have further steps.
UNFINISHED = "unfinished"
#: The id of an entry, within the numbers that Redis accepts.
_ENTRY_ID = re.compile(r"[0-9]{1,18}-[0-9]{1,18}")
#: The fields of an entry that hold texts.
_TEXTS = ("by", "door", "action", "queue", "tenant", "details")

#: Errors by which a request is refused before it changes anything. One that is also a ``ConnectionError``,
#: such as that of too few replicas, comes after the change.
_REFUSALS = (DQError, redis.ResponseError, redis.DataError)


@dataclass(frozen=True)
class AuditEntry:
    """One change.

    Attributes:
        at: Time of the server, in milliseconds.
        by: User and host, or the name that the program gave.
        door: Interface of the change: ``app.dq``, ``celery dq``, or the name that the program gave.
        action: The change: ``quota_set``, ``quota_removed``, ``default_set``, ``default_removed``,
            ``quotas_made`` (import or copy), ``settings_applied``, ``paused``, ``resumed``, ``cancelled``,
            ``purged``, ``moved``, ``migrated``, ``migrated_back``, ``rescheduled``, ``reprioritised``,
            ``edited``, ``partitions_set``, ``dead_replayed``, ``dead_edited``, ``dead_purged``,
            ``dead_recovered``, ``dedup_evicted``, ``leadership_forgotten`` or ``forgotten`` (a queue).
        queue: Name of the queue.
        tenant: Tenant; "" when the change was not for one tenant.
        details: The new quota, the end of a pause, the task id or task name, the destination, a filter of
            dead letters, up to three tenants whose quotas were made. "interrupted; at least 3" at its end
            means that more than `count` may be changed, because a reply was lost. "unfinished" at its end
            means that a replay by steps goes on, or was stopped.
        count: Number of messages, or other things, that were changed.
    """

    at: datetime
    by: str
    door: str
    action: str
    queue: str
    tenant: str = ""
    details: str = ""
    count: int = 1


#: Interface, user and reason of the changes that a thread or coroutine makes.
AuditDoor: TypeAlias = "ContextVar[tuple[str, str, str]]"
#: Called after each chunk with the number of messages, or other things, that the call has changed by then.
OnProgress: TypeAlias = Callable[[int], object]


def ignore_progress(done: int) -> None:
    """Do nothing: the default of calls that report their progress."""


@dataclass
class AuditedChange:
    """A change under way; it is written at its end, unless nothing was changed.

    Attributes:
        count: Number of messages, or other things, that were changed so far.
        details: See :class:`AuditEntry`.
        is_unfinished: Whether further steps may follow.
        entry_id: Id of its entry, once that is written, or of the entry of the steps before.
        on_progress: Called by :meth:`add` with the count.
    """

    count: int = 0
    details: str = ""
    is_unfinished: bool = False
    entry_id: str = ""
    on_progress: OnProgress = ignore_progress

    def add(self, count: int) -> None:
        """Count further things that were changed, and report the progress."""
        self.count += count
        self.on_progress(self.count)


class AuditTrail:
    """Reads and writes the stream. ``app.dq.audit()`` reads.

    Args:
        options: Returns the app's settings.
        channel: Borrows a channel of the tenant broker.
        door: Interface, user and reason of the changes; default: a variable of its own.
    """

    def __init__(
        self,
        options: Callable[[], Options],
        channel: Callable[[], AbstractContextManager[Any]],
        door: AuditDoor | None = None,
    ) -> None:
        self._options = options
        self._channel = channel
        self.door = door or ContextVar("dq_audit_door", default=("app.dq", "", ""))

    def __call__(
        self, *, since: datetime | None = None, queue: str | None = None, limit: int = 100
    ) -> list[AuditEntry]:
        """Read the latest changes, the latest first.

        Args:
            since: Only changes from this time on; without a zone it is local time.
            queue: Only changes of this queue.
            limit: Number of changes, at most.
        """
        check_count("limit", limit)
        if queue is not None:
            check_text("queue", queue)
        first = "-" if since is None else str(round(bounded_us(since) / 1000))
        found: list[AuditEntry] = []
        last = "+"
        with self._channel() as channel:
            while len(found) < limit:
                part = channel.client.xrevrange(self._key, last, first, count=CHUNK)
                entries = [_entry(text(entry_id), fields) for entry_id, fields in part]
                found += [entry for entry in entries if queue in (None, entry.queue)]
                if len(part) < CHUNK:
                    break
                last = f"({text(part[-1][0])}"
        return found[:limit]

    @contextmanager
    def through(self, door: str, *, by: str = "", reason: str = "") -> Iterator[None]:
        """Name the interface and the user of all changes in the block, in this thread or coroutine.

        Args:
            door: Name of the interface, such as ``admin``.
            by: The user; default: user and host of the process.
            reason: Why the user makes the changes; it ends the details of each entry.
        """
        check_text("door", door)
        token = self.door.set((door, by, reason))
        try:
            yield
        finally:
            self.door.reset(token)

    @property
    def author(self) -> str:
        """The user of the changes that this thread or coroutine makes."""
        return self.door.get()[1] or _process_user()

    @contextmanager
    def change(
        self,
        client: Client,
        action: str,
        queue: str,
        *,
        tenant: str | None = None,
        details: str = "",
        continues: str = "",
        on_progress: OnProgress = ignore_progress,
    ) -> Iterator[AuditedChange]:
        """Write an entry at the end of the block if it has changed anything, or may have.

        A block that ends by an error other than a refusal may have changed more than it has counted: the
        reply to its last request is lost. A failed write is a warning in the log, because the change itself
        is done by then.

        The entry of a further step replaces the one that it `continues`, and has the sum of their counts. An
        entry of another user or another change is never replaced.
        """
        change = AuditedChange(details=details, entry_id=continues, on_progress=on_progress)
        is_known = False
        try:
            yield change
            is_known = True
        except BaseException as exc:
            is_known = isinstance(exc, _REFUSALS) and not isinstance(exc, ConnectionError)
            raise
        finally:
            self._write(client, action, queue, tenant or "", change, is_known=is_known)

    @property
    def _key(self) -> str:
        options = self._options()
        return audit_stream(options.environment, options.key_prefix)

    def _write(
        self, client: Client, action: str, queue: str, tenant: str, change: AuditedChange, *, is_known: bool
    ) -> None:
        door, _, reason = self.door.get()
        details = _joined(change.details, reason and f"reason: {reason}")
        fields: dict[str, Any] = {
            "by": self.author,
            "door": door,
            "action": action,
            "queue": queue,
            "tenant": tenant,
        }
        try:
            known = {**fields, "details": _joined(details, UNFINISHED)}
            before = self._replaceable(client, change.entry_id, known)
            if not change.count and before is None and is_known:
                return
            count = change.count + (before or 0)
            end = UNFINISHED if change.is_unfinished else ""
            if not is_known:
                end = f"interrupted; at least {count}"
            fields |= {"details": _joined(details, end), "count": count}
            added = client.xadd(self._key, fields, maxlen=MAX_ENTRIES, approximate=True)
            if before is not None:
                client.xdel(self._key, change.entry_id)
            change.entry_id = text(added)
        except (redis.RedisError, OSError) as exc:
            logger.warning(
                "Change %s of queue %s by %s (%s) could not be written to the audit stream: %s",
                action,
                queue,
                fields["by"],
                details or f"{change.count} changed",
                exc,
                extra={"event": "audit_not_written", "queue": queue, "action": action},
            )

    def _replaceable(self, client: Client, entry_id: str, expected: dict[str, str]) -> int | None:
        """Return the count of an unfinished entry; None if there is none, or if it is of another change."""
        for _, fields in client.xrevrange(self._key, entry_id, entry_id) if entry_id else ():
            known = {text(name): text(value) for name, value in fields.items()}
            if expected.items() <= known.items():
                return int(number(known["count"]))
        return None


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def check_entry_id(entry_id: str) -> None:
    """Refuse a text that is neither "" nor the id of an entry.

    Raises:
        InvalidRequest: It is neither.
    """
    if entry_id and not _ENTRY_ID.fullmatch(entry_id):
        raise InvalidRequest(
            f"continues = {entry_id[:40]!r} is not an id of an audit entry: give `.entry_id`"
        )


def _entry(entry_id: str, fields: dict[bytes, bytes]) -> AuditEntry:
    known = {text(name): text(value) for name, value in fields.items()}
    # Another program may have written any id and any field.
    at = moment(int(entry_id.partition("-")[0]) * 1000) or datetime.fromtimestamp(0, timezone.utc)
    by, door, action, queue, tenant, details = (known.get(name, "") for name in _TEXTS)
    return AuditEntry(at, by, door, action, queue, tenant, details, int(number(known.get("count", 1))))


def _process_user() -> str:
    """Return the user and the host of this process."""
    try:
        user = getuser()
    except (KeyError, OSError):  # A user without an entry in the system's list, as in some containers.
        user = f"uid {os.getuid()}"
    return f"{user}@{gethostname()}"
