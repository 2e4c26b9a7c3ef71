"""The number of partitions of a queue, also while a change of it moves tenants.

The *map* of a queue says which partition is the home of a tenant. Every partition stores it as a text, and
refuses messages of a client that knows another one. ``7`` and ``7#3`` mean seven partitions, the latter after
earlier changes. ``7<4#2`` means that tenants move from their homes among four to those among seven. The
number behind ``#`` is the version. It grows with each step, so that no late client brings an old map back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

from celery_dq.errors import ConfigurationError, InvalidTenant
from celery_dq.transport.redis.store.home import Homes
from celery_dq.transport.resource_set import resources_of

_MAP = re.compile(r"(?P<count>[1-9][0-9]*)(<(?P<before>[1-9][0-9]*))?(#(?P<version>[0-9]+))?")
#: Behind the map that a push carries: the tenants of its messages move.
MOVING = "!"


@dataclass(frozen=True)
class PartitionMap:
    """The homes of the tenants of a queue.

    Attributes:
        count: Number of partitions; after the change, if one is under way.
        before: Number of partitions before the change; None without one.
        version: Number of the map, which grows with each change and each end of one.
        total: Number of partitions that may hold messages: those of both numbers during a change.
        text: The map as partitions store it.
    """

    count: int = 1
    before: int | None = None
    version: int = 0
    total: int = field(init=False, compare=False, repr=False)
    text: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Plain attributes, because each publish reads them.
        before = f"<{self.before}" if self.before is not None else ""
        text = f"{self.count}{before}" + (f"#{self.version}" if self.version else "")
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "total", max(self.count, self.before or 0))

    @classmethod
    def parse(cls, stored: str) -> PartitionMap:
        """Return the map that a partition has stored.

        Raises:
            ConfigurationError: Another program has written it.
        """
        found = _MAP.fullmatch(stored)
        if found is None:
            raise ConfigurationError(f"{stored!r} is no number of partitions: another program has written it")
        before = found["before"]
        return cls(int(found["count"]), int(before) if before else None, int(found["version"] or 0))

    def __str__(self) -> str:
        return self.text

    def home(self, tenant: str) -> int:
        """Return the number of the partition in which a tenant lives, or to which it moves."""
        return self._homes.of(tenant)

    def home_in(self, queue: str, tenant: str) -> int:
        """Return the home of a tenant for a message that comes to the queue.

        Raises:
            InvalidTenant: It is a set of resources, and the queue has several partitions. A claim sees one.
        """
        if self.total > 1 and resources_of(tenant) is not None:
            raise InvalidTenant(
                f"tenant = {tenant!r}: queue {queue!r} has {self.total} partitions, and the resources of a "
                f"set must be in one: send it to a queue with partitions = 1, or name one resource"
            )
        return self.home(tenant)

    def old_home(self, tenant: str) -> int:
        """Return the number of the partition from which a tenant moves; its home if it does not move."""
        return self.home(tenant) if self._old_homes is None else self._old_homes.of(tenant)

    def moves(self, tenant: str) -> bool:
        """Return whether the present change gives a tenant another home."""
        return self._old_homes is not None and self._old_homes.of(tenant) != self.home(tenant)

    def begin(self, count: int) -> PartitionMap:
        """Return the map with which a change to another number begins."""
        return PartitionMap(count, self.count, self.version + 1)

    def end(self) -> PartitionMap:
        """Return the map with which the change ends."""
        return PartitionMap(self.count, None, self.version + 1)

    @cached_property
    def _homes(self) -> Homes:
        return Homes(self.count)

    @cached_property
    def _old_homes(self) -> Homes | None:
        return None if self.before is None else Homes(self.before)
