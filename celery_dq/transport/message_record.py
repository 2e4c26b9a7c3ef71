"""A message as it is stored: a small binary header, the envelope, the raw body.

The Lua scripts of Redis read only the header (``include/record.lua`` unpacks the same layout). A record never
changes, so it is written once and read once.

Layout, big-endian::

    B version   B priority   B flags   d due µs   d expires µs
    H len(tenant)   H len(task)   I len(envelope)
    tenant   task   envelope   body   [dedup   H len(dedup)]

``due`` is 0 for a message that may run at once, ``expires`` 0 for one that never expires. Flag 1 means that
the body is text, flag 2 that a dedup section follows it, see :class:`DedupSection`. Flag 4 means that ``due``
was computed from a countdown by the publisher's clock. The push turns it into the time of the store,
which keeps the record without the flag. So it does with flag 8, which means that the message was accepted
before, and the bound of its tenant's backlog does not refuse it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple

from celery_dq.errors import CorruptRecord, InvalidMessage
from celery_dq.transport.tenant import MAX_PRIORITY

VERSION = 1
TEXT = 1
KEYED = 2
COUNTED = 4
ACCEPTED = 8
_HEADER = struct.Struct(">BBBddHHI")
HEADER_SIZE = _HEADER.size
#: Packs the header of a record, from the priority on.
pack_header = partial(_HEADER.pack, VERSION)
_SECTION = struct.Struct(">BddH")
_LENGTH = struct.Struct(">H")
_TENANT_SIZE_AT = struct.calcsize(">BBBdd")
REPLACE, WAITING, FOLLOW, AWAITED = 1, 2, 4, 8
#: The first time, in µs, that a double would not hold exactly: in the year 2255.
LATEST_US = 9_000_000_000_000_000
_UNITS = {1_000_000: "seconds", 1000: "milliseconds"}


@dataclass(frozen=True)
class DedupSection:
    """The part of a record that describes its dedup key.

    Layout: ``B flags  d timeout µs  d claim  H len(continues)  continues  key``.

    Attributes:
        key: the key, as text.
        timeout_us: µs for which the message may run before it may be evicted; 0 is without limit.
        replace: it replaces a message that waits.
        waiting: it may wait behind a message that runs.
        follow: when another message covers it, it is kept and gets the result of that one.
        awaited: a caller waits for its result; when a later message replaces it, it gets the result of that.
        continues: message id and claim number of the run that it repeats.
    """

    key: str
    timeout_us: int = 0
    replace: bool = False
    waiting: bool = True
    follow: bool = False
    awaited: bool = False
    continues: tuple[str, int] = ("", 0)

    def pack(self) -> bytes:
        """Return the section as a record has it, without its length."""
        flags = (
            (REPLACE if self.replace else 0)
            | (WAITING if self.waiting else 0)
            | (FOLLOW if self.follow else 0)
            | (AWAITED if self.awaited else 0)
        )
        run = self.continues[0].encode()
        return _SECTION.pack(flags, self.timeout_us, self.continues[1], len(run)) + run + self.key.encode()

    def header(self) -> dict[str, Any]:
        """Return the header from which a worker on another broker requests the dedup lock."""
        return {
            "key": self.key,
            "timeout": self.timeout_us / 1e6 or None,
            "policy": "replace" if self.replace else "decline",
            "waiting": int(self.waiting),
        }

    @classmethod
    def unpack(cls, section: bytes) -> DedupSection:
        """Unpack a section.

        Raises:
            CorruptRecord: the bytes are not a section.
        """
        try:
            flags, timeout, claim, size = _SECTION.unpack_from(section)
            run, key = section[_SECTION.size :][:size].decode(), section[_SECTION.size + size :].decode()
            return cls(
                key,
                int(timeout),
                replace=bool(flags & REPLACE),
                waiting=bool(flags & WAITING),
                follow=bool(flags & FOLLOW),
                awaited=bool(flags & AWAITED),
                continues=(run, int(claim)),
            )
        except Exception as exc:
            raise CorruptRecord.of("the dedup key of a stored message", exc) from exc


def as_accepted(raw: bytes) -> bytes:
    """Return a record with the flag of a message that was accepted before."""
    return raw[:2] + bytes((raw[2] | ACCEPTED,)) + raw[3:] if len(raw) >= HEADER_SIZE else raw


def as_moved(raw: bytes) -> bytes:
    """Return a record for another queue, where it asks for the dedup lock of its key again.

    When an awaited message is declined there, it must get the result of the covering run, for its caller.
    """
    raw = as_accepted(raw)
    if len(raw) < HEADER_SIZE or not raw[2] & KEYED:
        return raw
    record = MessageRecord.unpack(raw)
    section = DedupSection.unpack(record.dedup)
    section = replace(section, follow=section.awaited, continues=("", 0))
    return record._replace(dedup=section.pack()).pack()


class MessageRecord(NamedTuple):
    """One stored message, unpacked.

    Attributes:
        tenant: the tenant; ``""`` when none was named.
        task: Celery task name, ``""`` for a message that is not a task.
        priority: 0 to 9, higher is more urgent.
        due_us: when it may be delivered, µs since the epoch; 0 = at once.
        expires_us: from when on it must not run, µs since the epoch; 0 = never.
        envelope: headers and properties, see :mod:`celery_dq.transport.in_flight`.
        body: the serialised body; ``str`` when the serializer made text.
        dedup: the packed :class:`DedupSection`; empty without a dedup key.
        counted: ``due_us`` was computed from a countdown by the clock of the publisher.
        accepted: the message was accepted before: it is a retry, or moves here.
    """

    tenant: str
    task: str
    priority: int
    due_us: int
    expires_us: int
    envelope: bytes
    body: str | bytes
    dedup: bytes = b""
    counted: bool = False
    accepted: bool = False

    def pack(self) -> bytes:
        """Return the bytes that are stored."""
        body, flags, end = self.body, 0, b""
        if isinstance(body, str):
            body, flags = body.encode("utf-8", "surrogatepass"), TEXT
        if self.dedup:
            flags, end = flags | KEYED, section_end(self.dedup)
        if self.counted:
            flags |= COUNTED
        if self.accepted:
            flags |= ACCEPTED
        tenant, task = self.tenant.encode(), self.task.encode()
        times, sizes = (self.due_us, self.expires_us), (len(tenant), len(task), len(self.envelope))
        header = pack_header(self.priority, flags, *times, *sizes)
        return b"".join((header, tenant, task, self.envelope, body, end))

    @classmethod
    def unpack(cls, raw: bytes) -> MessageRecord:
        """Unpack stored bytes.

        Raises:
            CorruptRecord: the bytes are not a record, because another program wrote to the store.
        """
        try:
            version, priority, flags, due, expires, n_tenant, n_task, n_envelope = _HEADER.unpack_from(raw)
            if version != VERSION:
                raise CorruptRecord(
                    f"a stored message has layout version {version}, this release reads {VERSION}: "
                    "drain the queue with the release that wrote it"
                )
            task_at = HEADER_SIZE + n_tenant
            envelope_at = task_at + n_task
            body_at = envelope_at + n_envelope
            if body_at > len(raw):
                raise CorruptRecord(
                    f"a stored message is cut short: {len(raw)} bytes, its header names {body_at}"
                )
            end, dedup = len(raw), b""
            if flags & KEYED:
                (size,) = _LENGTH.unpack_from(raw, end - _LENGTH.size)
                end -= size + _LENGTH.size
                dedup = raw[end : -_LENGTH.size]
                if end < body_at:
                    raise CorruptRecord("the dedup key of a stored message reaches into its header")
            if priority > MAX_PRIORITY or not (0 <= due < LATEST_US and 0 <= expires < LATEST_US):
                raise CorruptRecord(
                    f"a stored message has priority {priority}, is due at {due} and expires at {expires} µs"
                )
            body: str | bytes = raw[body_at:end]
            if flags & TEXT:
                body = raw[body_at:end].decode("utf-8", "surrogatepass")
            return cls(
                raw[HEADER_SIZE:task_at].decode(),
                raw[task_at:envelope_at].decode(),
                priority,
                int(due),
                int(expires),
                raw[envelope_at:body_at],
                body,
                dedup,
                bool(flags & COUNTED),
                bool(flags & ACCEPTED),
            )
        except Exception as exc:
            raise CorruptRecord.of("a stored message", exc) from exc


def tenant_of(record: bytes) -> str:
    """Return the tenant of a record that this process has packed."""
    (size,) = _LENGTH.unpack_from(record, _TENANT_SIZE_AT)
    return record[HEADER_SIZE : HEADER_SIZE + size].decode()


def placing_of(record: bytes, task_id: str) -> tuple[str, str]:
    """Return the tenant of a message, and its dedup key, or its task id if it has none.

    Raises:
        CorruptRecord: the bytes are not a record.
    """
    unpacked = MessageRecord.unpack(record)
    return unpacked.tenant, DedupSection.unpack(unpacked.dedup).key if unpacked.dedup else task_id


def dedup_key_of(record: bytes) -> str | None:
    """Return the dedup key of a record; None without one.

    Raises:
        CorruptRecord: the record has a dedup section that cannot be read.
    """
    if not record[2] & KEYED:
        return None
    (size,) = _LENGTH.unpack_from(record, len(record) - _LENGTH.size)
    return DedupSection.unpack(record[-size - _LENGTH.size : -_LENGTH.size]).key


def section_end(section: bytes) -> bytes:
    """Return the end of a record with this dedup section."""
    return section + _LENGTH.pack(len(section))


def due_us(eta: Any) -> int:
    """Return the header ``eta`` in µs since the epoch; 0 without one."""
    return 0 if eta is None else _instant_us("eta", eta)


def expires_us(expires: Any, expiration: Any, now_us: int) -> int:
    """Return when a message expires, in µs since the epoch; 0 for never.

    Args:
        expires: The header ``expires``.
        expiration: The property ``expiration``, in milliseconds from now.
        now_us: Wall time in µs.
    """
    if isinstance(expires, (int, float)):
        # The remote control of kombu: seconds since the epoch, or 0.
        return _later_us("expires", expires, 1_000_000, 0)
    if expires is not None:
        return _instant_us("expires", expires)
    return 0 if expiration is None else _later_us("expiration", expiration, 1000, now_us)


def _later_us(name: str, value: Any, unit_us: int, from_us: int) -> int:
    """Return the time that is a number of units after another one."""
    try:
        instant_us = from_us + max(int(float(value) * unit_us), 0)
    except (TypeError, ValueError, OverflowError):
        raise InvalidMessage(f"{name} = {value!r} is not a number of {_UNITS[unit_us]}") from None
    return _in_time(name, value, instant_us)


def _instant_us(name: str, value: Any) -> int:
    """Return an ISO 8601 text or a datetime as µs since the epoch. A value without a time zone is UTC."""
    try:
        if isinstance(value, str):
            value = datetime.fromisoformat(value[:-1] + "+00:00" if value.endswith("Z") else value)
        if value.tzinfo is None:
            value = value.replace(tzinfo=timezone.utc)
        # 0 means that there is no time, so times before 1970 become 1.
        instant_us = max(int(value.timestamp() * 1_000_000), 1)
    except (ValueError, TypeError, AttributeError, OverflowError):
        raise InvalidMessage(
            f"{name} = {value!r} is not a time: give a datetime or an ISO 8601 text"
        ) from None
    return _in_time(name, value, instant_us)


def _in_time(name: str, value: Any, instant_us: int) -> int:
    if instant_us >= LATEST_US:
        raise InvalidMessage(f"{name} = {value} is too far away: the year 2255 is the last; leave it out")
    return instant_us
