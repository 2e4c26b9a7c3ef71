"""Task ids that name the tenant of their message, so that a look by the id begins in the right partition.

Such an id is a UUID of version 8 (RFC 9562): its first 32 bits are the hash that decides the tenant's home,
and all others are random. The hash does not depend on the number of partitions. Every other id names none.

No answer relies on the tenant of an id. A program may have published it again for another one.
"""

from __future__ import annotations

import re

from celery_dq.transport.redis.store.home import tenant_hash

_ID = re.compile(r"([0-9a-f]{8})-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def id_start(tenant: str) -> str:
    """Return the first eight digits of the task ids of a tenant."""
    return f"{tenant_hash(tenant):08x}"


def id_rest(digits: str) -> str:
    """Return the rest of a task id, made of 32 random hexadecimal digits, of which the last 24 count."""
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"-{digits[8:12]}-8{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


def tenant_hash_in(task_id: str) -> int | None:
    """Return the hash of the tenant that an id names; None for an id that names none."""
    found = _ID.fullmatch(task_id)
    return None if found is None else int(found[1], 16)
