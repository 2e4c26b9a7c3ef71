"""The partitions of the tenants of a queue, also while a change moves tenants.

The *map* of a queue says which partition is the home of a tenant. Every partition stores it as a text, and
refuses messages of a client that knows another one. ``7`` and ``7#3`` mean seven partitions, the latter after
earlier changes. ``7<4#2`` means that tenants move from their homes among four to those among seven. The
number behind ``#`` is the version. It grows with each step, so that no late client brings an old map back.

A *spread* tenant has several *shares*, each in another partition; share 0 is in its home. Its messages are
divided among them by their dedup keys, or by their task ids. The *spreads* are stored beside the map, and
belong to its version. ``7<7#4`` means that only the spread of a tenant changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from celery_dq.errors import ConfigurationError
from celery_dq.transport.redis.store.home import Homes, share_of, shares_of
from celery_dq.transport.redis.store.record import dedup_key_of, tenant_of

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
        spreads: Spread tenants, each with its number of shares now and before the change. A version has one
            set of them, so that they do not count in a comparison.
        total: Number of partitions that may hold messages: those of both numbers during a change.
        text: The map as partitions store it, without the spreads.
    """

    count: int = 1
    before: int | None = None
    version: int = 0
    spreads: Mapping[str, tuple[int, int]] = field(default_factory=dict, compare=False)
    total: int = field(init=False, compare=False, repr=False)
    text: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Plain attributes, because each publish reads them.
        before = f"<{self.before}" if self.before is not None else ""
        text = f"{self.count}{before}" + (f"#{self.version}" if self.version else "")
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "total", max(self.count, self.before or 0))

    @classmethod
    def parse(cls, stored: str, spreads: str = "") -> PartitionMap:
        """Return the map that a partition has stored.

        Args:
            stored: Its text.
            spreads: The text of its spreads. A map without them is good for comparisons only.

        Raises:
            ConfigurationError: Another program has written it.
        """
        found = _MAP.fullmatch(stored)
        if found is None:
            raise ConfigurationError(f"{stored!r} is no number of partitions: another program has written it")
        try:
            spread = {
                name: (int(now), int(before)) for name, (now, before) in json.loads(spreads or "{}").items()
            }
        except (ValueError, TypeError, AttributeError):
            raise ConfigurationError(
                f"{spreads[:60]!r} are no spreads of tenants: another program has written them"
            ) from None
        before = found["before"]
        return cls(int(found["count"]), int(before) if before else None, int(found["version"] or 0), spread)

    def __str__(self) -> str:
        return self.text

    @property
    def spreads_text(self) -> str:
        """The spreads as partitions store them."""
        return json.dumps(self.spreads, sort_keys=True) if self.spreads else ""

    # -- of a tenant

    def spread(self, tenant: str) -> int:
        """Return the number of shares that a tenant has or gets."""
        return self.spreads.get(tenant, (1, 1))[0]

    def home(self, tenant: str) -> int:
        """Return the number of the partition in which a tenant lives, or to which it moves."""
        return self._homes.of(tenant)

    def shares(self, tenant: str) -> tuple[int, ...]:
        """Return the partition of each share that a tenant has or gets."""
        return self._shares[tenant][0] if tenant in self.spreads else (self._homes.of(tenant),)

    def old_shares(self, tenant: str) -> tuple[int, ...]:
        """Return the partition of each share before the present change; :meth:`shares` without one."""
        if tenant in self.spreads:
            return self._shares[tenant][1]
        return (self._homes.of(tenant) if self._old_homes is None else self._old_homes.of(tenant),)

    def numbers(self, tenant: str) -> dict[int, int]:
        """Return the partitions of a tenant before and after the present change, the latter first.

        Returns:
            The number of each partition, and the number of the share in it.
        """
        found = {number: share for share, number in enumerate(self.shares(tenant))}
        for share, number in enumerate(self.old_shares(tenant)):
            found.setdefault(number, share)
        return found

    def widest(self, tenant: str) -> int:
        """Return the larger one of a tenant's numbers of shares before and after the present change."""
        return max(self.spreads.get(tenant, (1, 1)))

    def moves(self, tenant: str) -> bool:
        """Return whether the present change gives a tenant another home, or other shares."""
        return self.before is not None and self.old_shares(tenant) != self.shares(tenant)

    # -- of a message

    def place(self, tenant: str, key: str) -> int:
        """Return the number of the partition for a message.

        Args:
            tenant: Its tenant.
            key: Its dedup key, or its task id if it has none.
        """
        shares = self.shares(tenant)
        return shares[share_of(key, len(shares))]

    def route(self, record: bytes, task_id: str) -> tuple[int, bool]:
        """Return the number of the partition for a message, and whether its tenant is to wait there.

        It waits where a message that belongs before this one may still be in another partition. Messages
        without a dedup key have no order among the shares of a tenant.
        """
        tenant = tenant_of(record)
        if tenant not in self.spreads:
            return self._homes.of(tenant), self.moves(tenant)
        key = dedup_key_of(record)
        place_key = task_id if key is None else key
        number, old = self.place(tenant, place_key), self.old_shares(tenant)
        moves = number != old[share_of(place_key, len(old))]
        return number, moves and (key is not None or number not in old)

    # -- changes

    def begin(self, count: int) -> PartitionMap:
        """Return the map with which a change to another number begins."""
        return PartitionMap(count, self.count, self.version + 1, self.spreads)

    def begin_spread(self, tenant: str, spread: int) -> PartitionMap:
        """Return the map with which a change of a tenant's number of shares begins."""
        spreads = {**self.spreads, tenant: (spread, self.spread(tenant))}
        return PartitionMap(self.count, self.count, self.version + 1, spreads)

    def end(self) -> PartitionMap:
        """Return the map with which the change ends."""
        spreads = {name: (now, now) for name, (now, _) in self.spreads.items() if now > 1}
        return PartitionMap(self.count, None, self.version + 1, spreads)

    @cached_property
    def _homes(self) -> Homes:
        return Homes(self.count)

    @cached_property
    def _old_homes(self) -> Homes | None:
        return None if self.before is None else Homes(self.before)

    @cached_property
    def _shares(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        return {
            tenant: (shares_of(tenant, self.count, now), shares_of(tenant, self.before or self.count, before))
            for tenant, (now, before) in self.spreads.items()
        }
