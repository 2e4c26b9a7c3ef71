"""A message as it lies in Redis: a small binary header, the envelope, the raw body.

The header is what the Lua scripts read (``include/record.lua`` unpacks the same
layout); the rest is opaque to them. A record never changes while it lives, so
it is written once and read once.

Layout, big-endian::

    B version   B priority   B flags   d due µs   d expires µs
    H len(tenant)   H len(task)   I len(envelope)
    tenant   task   envelope   body

``due`` is 0 for a message that may run at once, ``expires`` 0 for one that never
does. Flag 1 says that the body is text.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from celery_dq.errors import CorruptRecord

VERSION = 1
TEXT = 1
_HEADER = struct.Struct(">BBBddHHI")
HEADER_SIZE = _HEADER.size


@dataclass(frozen=True)
class Record:
    """One stored message, taken apart.

    Attributes:
        tenant: whose work it is; ``""`` when nobody said.
        task: Celery task name, ``""`` for a message that is no task.
        priority: 0 to 9, higher is more urgent.
        due_us: when it may be delivered, µs since the epoch; 0 = at once.
        expires_us: from when on it must not run, µs since the epoch; 0 = never.
        envelope: headers and properties, see :mod:`celery_dq.transport.envelope`.
        body: the serialised body; ``str`` when the serializer made text.
    """

    tenant: str
    task: str
    priority: int
    due_us: int
    expires_us: int
    envelope: bytes
    body: str | bytes

    def pack(self) -> bytes:
        """Return the bytes that go into the ``messages`` hash."""
        body, flags = self.body, 0
        if isinstance(body, str):
            body, flags = body.encode("utf-8", "surrogatepass"), TEXT
        tenant, task = self.tenant.encode(), self.task.encode()
        return pack_record(
            tenant, task, self.priority, flags, self.due_us, self.expires_us, self.envelope, body
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Record:
        """Take stored bytes apart.

        Raises:
            CorruptRecord: they are not a record (a foreign client wrote to the hash).
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
            body: str | bytes = raw[body_at:]
            if flags & TEXT:
                body = raw[body_at:].decode("utf-8", "surrogatepass")
            return cls(
                raw[HEADER_SIZE:task_at].decode(),
                raw[task_at:envelope_at].decode(),
                priority,
                int(due),
                int(expires),
                raw[envelope_at:body_at],
                body,
            )
        except (struct.error, UnicodeDecodeError) as exc:
            raise CorruptRecord(f"a stored message cannot be read: {exc}") from exc


def pack_record(
    tenant: bytes,
    task: bytes,
    priority: int,
    flags: int,
    due_us: int,
    expires_us: int,
    envelope: bytes,
    body: bytes,
) -> bytes:
    """Return the bytes of a record whose parts are encoded already; see :class:`Record`."""
    head = _HEADER.pack(VERSION, priority, flags, due_us, expires_us, len(tenant), len(task), len(envelope))
    return b"".join((head, tenant, task, envelope, body))
