"""The ids of calls for which the caller names none.

Celery's ids are random UUIDs of version 4. In an app with a queue of several partitions, ids name the tenant
of their call, see :mod:`celery_dq.transport.redis.store.home`. Canvas makes the ids of its tasks
before their tenants are known, so those name none.
"""

from __future__ import annotations

import os
from typing import Any

from celery_dq.app.api.api import dq_of
from celery_dq.transport.redis.store.home import id_rest, id_start

__all__ = ["Ids"]

#: Number of tenants whose first digits are remembered.
REMEMBERED_TENANTS = 10_000


class Ids:
    """A supply of task ids, as text. Belongs to one process: a fork would repeat the ids.

    Args:
        app: a Celery app.

    Attributes:
        name_tenants: whether the ids name the tenants of their calls.
    """

    def __init__(self, app: Any) -> None:
        dq = dq_of(app)
        self.name_tenants = dq.serves_queues() and any(each.partitions > 1 for each in dq.options.queues)
        self._made_of = id_rest if self.name_tenants else _uuid4
        #: Ids, or the rests of ids behind the digits of the tenant.
        self._ready: list[str] = []
        self._starts: dict[bytes, str] = {}

    def new(self, tenant: bytes) -> str:
        """Return the next id, for a call of this tenant. Thread-safe."""
        try:
            made = self._ready.pop()
        except IndexError:
            made = self._more()
        if not self.name_tenants:
            return made
        return (self._starts.get(tenant) or self._start(tenant)) + made

    def _more(self) -> str:
        # One system call provides the random bytes for 256 ids.
        noise = os.urandom(16 * 256).hex()
        made = [self._made_of(noise[at : at + 32]) for at in range(0, len(noise), 32)]
        last = made.pop()
        self._ready.extend(made)
        return last

    def _start(self, tenant: bytes) -> str:
        if len(self._starts) >= REMEMBERED_TENANTS:
            self._starts.clear()
        start = self._starts[tenant] = id_start(tenant.decode())
        return start


def _uuid4(digits: str) -> str:
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
