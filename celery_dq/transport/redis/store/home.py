"""The partition in which a tenant lives, those of a spread tenant, and the task ids that name a tenant.

A *jump consistent hash* (Lamping and Veach 2014, "A Fast, Minimal Memory, Consistent Hash Algorithm",
arXiv:1406.2294) chooses it. When the number of partitions grows from *n* to *m*, only (*m* - *n*) / *m* of
the tenants move, and each of them to a new partition.

A *spread* tenant has several *shares*, each in another partition.

An id that names the tenant of its message is a UUID of version 8 (RFC 9562): its first 32 bits are the hash
that decides the home, and all others are random. So a look by the id begins in the right partition. The hash
does not depend on the number of partitions. Every other id names no tenant, and no answer relies on that of
an id: a program may have published it again for another one.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Iterator
from hashlib import blake2b

#: Number of tenants whose partition is remembered, of each queue.
REMEMBERED_TENANTS = 10_000

#: Bytes of a hash. Four leave 90 random bits in a task id, and divide the tenants among 4096 partitions.
_HASH_SIZE = 4
_MASK = (1 << 64) - 1
_SALT = struct.Struct(">Q")


def home_of(tenant: str, count: int) -> int:
    """Return the number of the partition in which *tenant* lives.

    Every client must agree on it, so it never changes for a tenant and a count.

    Args:
        tenant: The tenant; ``""`` is the tenant of messages without one.
        count: Number of partitions, from 1.
    """
    return 0 if count == 1 else jump_hash(tenant_hash(tenant), count)


def tenant_hash(tenant: str) -> int:
    """Return the number of 32 bits that decides the home of a tenant; task ids may begin with it."""
    return _hash(tenant)


def drawn(tenant: str, count: int) -> Iterator[int]:
    """Yield partitions for the shares of a tenant, its home first; a partition may come again."""
    for draw in itertools.count():
        yield jump_hash(_hash(tenant, draw), count)


def share_of(key: str, spread: int) -> int:
    """Return the number of the share to which a message of a spread tenant belongs.

    A higher spread moves messages to the new shares only.

    Args:
        key: The dedup key of the message, or the task id of one without.
        spread: Number of shares.
    """
    return 0 if spread == 1 else jump_hash(_hash(key), spread)


def _hash(text: str, draw: int = 0) -> int:
    data = text.encode("utf-8", "surrogateescape")
    return int.from_bytes(blake2b(data, digest_size=_HASH_SIZE, salt=_SALT.pack(draw)).digest(), "big")


def jump_hash(key: int, count: int) -> int:
    """Return the bucket of a key of up to 64 bits among *count* buckets, as in the paper."""
    bucket, jump = 0, 0
    while jump < count:
        bucket = jump
        key = (key * 2_862_933_555_777_941_757 + 1) & _MASK
        jump = int((bucket + 1) * ((1 << 31) / ((key >> 33) + 1)))
    return bucket


class Homes:
    """The partitions of the tenants of one queue. Thread-safe.

    Args:
        count: Number of partitions of the queue.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._known: dict[str, int] = {}

    def of(self, tenant: str) -> int:
        """Return the number of the partition of *tenant*; see :func:`home_of`."""
        home = self._known.get(tenant)
        if home is None:
            home = home_of(tenant, self.count)
            if len(self._known) >= REMEMBERED_TENANTS:
                self._known.clear()
            self._known[tenant] = home
        return home


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
