"""The partitions of the tenants of a queue, also while a change moves tenants.

The *map* of a queue says which partition is the home of a tenant. Every partition stores it as a text, and
refuses messages of a client that knows another one. ``7`` and ``7#3`` mean seven partitions, the latter after
earlier changes. ``7<4#2`` means that tenants move from their homes among four to those among seven. The
number behind ``#`` is the version. It grows with each step, so that no late client brings an old map back.

A *spread* tenant has several *shares*, each in another partition. Its messages are divided among them by
their dedup keys, or by their task ids. The *spreads* are stored beside the map, and belong to its version.
``7<7#4`` means that only the spread of a tenant changes.

A partition with a share now and before has the same one. So a share moves only to a partition that had none,
and no partition waits for another one that waits for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TypeAlias

from celery_dq.errors import ConfigurationError, InvalidTenant
from celery_dq.transport.message_record import dedup_key_of, tenant_of
from celery_dq.transport.redis.store.home import (
    Homes,
    drawn,
    jump_hash,
    share_of,
    tenant_hash,
    tenant_hash_in,
)
from celery_dq.transport.resource_set import resources_of

#: A number that another program has written could be any, and each partition costs a question.
_MAP = re.compile(r"(?P<count>[1-9][0-9]{0,3})(<(?P<before>[1-9][0-9]{0,3}))?(#(?P<version>[0-9]{1,15}))?")
#: How often a map is asked for before the partitions of its queue count as changing all the time.
ROUTINGS = 4
#: Behind the map that a push carries: the tenants of its messages move.
MOVING = "!"
#: The number of the partition of each share.
Shares: TypeAlias = "tuple[int, ...]"
#: Producer sequences whose last push was not answered that a process remembers.
MOST_UNANSWERED = 1000


@dataclass(frozen=True)
class PartitionMap:
    """The homes of the tenants of a queue.

    Attributes:
        count: Number of partitions; after the change, if one is under way.
        before: Number of partitions before the change; None without one.
        version: Number of the map, which grows with each change and each end of one.
        spreads: Spread tenants, each with the partitions of its shares now and before the change. A version
            has one set of them, so that they do not count in a comparison.
        total: Number of partitions that may hold messages: those of both numbers during a change.
        text: The map as partitions store it, without the spreads.
    """

    count: int = 1
    before: int | None = None
    version: int = 0
    spreads: Mapping[str, tuple[Shares, Shares]] = field(default_factory=dict, compare=False)
    total: int = field(init=False, compare=False, repr=False)
    text: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Plain attributes, because each publish reads them.
        before = f"<{self.before}" if self.before is not None else ""
        text = f"{self.count}{before}" + (f"#{self.version}" if self.version else "")
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "total", max(self.count, self.before or 0))

    @classmethod
    def parse(cls, stored: str, spreads: str = "", key: str = "state") -> PartitionMap:
        """Return the map that a partition has stored.

        Args:
            stored: Its text.
            spreads: The text of its spreads. A map without them is good for comparisons only.
            key: The key that has both.

        Raises:
            ConfigurationError: Another program has written it.
        """
        found = _MAP.fullmatch(stored)
        if found is None:
            raise ConfigurationError(
                f"{stored!r} is not a number of partitions: another program has written it into the field "
                f"'partitions' of the key {key!r}; restore the number there"
            )
        try:
            parsed = {
                name: (tuple(map(int, now)), tuple(map(int, before)))
                for name, (now, before) in json.loads(spreads or "{}").items()
            }
        except (ValueError, TypeError, AttributeError):
            raise ConfigurationError(
                f"{spreads[:60]!r} are not spreads of tenants: another program has written them into the "
                f"field 'spreads' of the key {key!r}"
            ) from None
        before = found["before"]
        return cls(int(found["count"]), int(before) if before else None, int(found["version"] or 0), parsed)

    def __str__(self) -> str:
        return self.text

    @property
    def spreads_text(self) -> str:
        """The spreads as partitions store them."""
        return json.dumps(self.spreads, sort_keys=True) if self.spreads else ""

    # -- of a tenant

    def home(self, tenant: str) -> int:
        """Return the number of the partition in which a tenant lives, or to which it moves.

        Of a spread tenant, it is that of the first share.
        """
        return self.partitions(tenant)[0]

    def partitions(self, tenant: str) -> Shares:
        """Return the partitions in which a tenant lives, or to which it moves, one for each share."""
        return self.spreads[tenant][0] if tenant in self.spreads else (self._homes.of(tenant),)

    def old_partitions(self, tenant: str) -> Shares:
        """Return the partitions in which a tenant lived before the change; :meth:`partitions` without one."""
        if tenant in self.spreads:
            return self.spreads[tenant][1]
        return (self._homes.of(tenant) if self._old_homes is None else self._old_homes.of(tenant),)

    def shares_by_partition(self, tenant: str) -> dict[int, int]:
        """Return which share of a tenant each of its partitions has.

        Those after the present change come first, and those before it follow.
        """
        found = {number: share for share, number in enumerate(self.partitions(tenant))}
        for share, number in enumerate(self.old_partitions(tenant)):
            found.setdefault(number, share)
        return found

    def concerns(self, number: int, tenant: str) -> bool:
        """Return whether a tenant has a share in a partition, now or before the present change.

        An interrupted change may have left quotas and pauses elsewhere.
        """
        return number in self.shares_by_partition(tenant)

    def widest(self, tenant: str) -> int:
        """Return the larger one of a tenant's numbers of shares before and after the present change."""
        return max(len(self.partitions(tenant)), len(self.old_partitions(tenant)))

    def moves(self, tenant: str) -> bool:
        """Return whether the present change gives a tenant another home, or other shares."""
        return self.before is not None and self.old_partitions(tenant) != self.partitions(tenant)

    # -- of a message

    def place(self, tenant: str, key: str) -> int:
        """Return the number of the partition for a message.

        Args:
            tenant: Its tenant.
            key: Its dedup key, or its task id if it has none.
        """
        shares = self.partitions(tenant)
        return shares[share_of(key, len(shares))]

    def old_place(self, tenant: str, key: str) -> int:
        """Return :meth:`place` before the present change."""
        shares = self.old_partitions(tenant)
        return shares[share_of(key, len(shares))]

    def likely(self, task_id: str) -> set[int]:
        """Return the numbers of the partitions for a message by its task id, now and before the change.

        A message of a spread tenant that has a dedup key may be in another one, and so may one that was
        published with the id of another tenant.

        Returns:
            Nothing, if the id names no tenant.
        """
        named = tenant_hash_in(task_id)
        if named is None:
            return set()
        spread = [tenant for tenant in self.spreads if tenant_hash(tenant) == named]
        if not spread:
            return {jump_hash(named, self.count), jump_hash(named, self.before or self.count)}
        return {place(tenant, task_id) for tenant in spread for place in (self.place, self.old_place)}

    def check_set(self, queue: str, tenant: str) -> None:
        """Refuse a set of resources in several partitions, because a claim sees one.

        Raises:
            InvalidTenant: The tenant is such a set, and the queue has several partitions.
        """
        if self.total > 1 and resources_of(tenant) is not None:
            raise InvalidTenant(
                f"tenant = {tenant!r}: queue {queue!r} has {self.total} partitions, and the resources of a "
                f"set must be in one: send it to a queue with partitions = 1, or name one resource"
            )

    def route(self, queue: str, record: bytes, task_id: str) -> tuple[int, bool]:
        """Return the number of the partition for a message, and whether its tenant is to wait there.

        It waits where a message that belongs before this one may still be in another partition. Messages
        without a dedup key have no order among the shares of a tenant.

        Args:
            queue: Name of the queue.
            record: The packed record of the message.
            task_id: Its task id.

        Raises:
            InvalidTenant: As for :meth:`check_set`.
        """
        tenant = tenant_of(record)
        self.check_set(queue, tenant)
        if tenant not in self.spreads:
            return self._homes.of(tenant), self.moves(tenant)
        key = dedup_key_of(record)
        place_key = task_id if key is None else key
        number = self.place(tenant, place_key)
        moves = number != self.old_place(tenant, place_key)
        return number, moves and (key is not None or number not in self.old_partitions(tenant))

    # -- changes

    @property
    def respread(self) -> str:
        """The tenant whose number of shares changes, as a text; "" in another change."""
        found = (repr(tenant) for tenant, (now, before) in self.spreads.items() if len(now) != len(before))
        return next(found, "")

    def begin(self, count: int) -> PartitionMap:
        """Return the map with which a change to another number begins.

        Shares stay, but for those in partitions that go.
        """
        spreads = {
            tenant: (_replaced(tenant, shares, count), shares) for tenant, (shares, _) in self.spreads.items()
        }
        return PartitionMap(count, self.count, self.version + 1, spreads)

    def begin_spread(self, tenant: str, spread: int) -> PartitionMap:
        """Return the map with which a change of a tenant's number of shares begins."""
        before = self.partitions(tenant)
        now = before[:spread] if spread > 1 else (self._homes.of(tenant),)
        others = (each for each in _drawn_once(tenant, self.count) if each not in before)
        spreads = {**self.spreads, tenant: ((*now, *islice(others, spread - len(now))), before)}
        return PartitionMap(self.count, self.count, self.version + 1, spreads)

    def end(self) -> PartitionMap:
        """Return the map with which the change ends."""
        spreads = {tenant: (now, now) for tenant, (now, _) in self.spreads.items() if len(now) > 1}
        return PartitionMap(self.count, None, self.version + 1, spreads)

    @cached_property
    def _homes(self) -> Homes:
        return Homes(self.count)

    @cached_property
    def _old_homes(self) -> Homes | None:
        return None if self.before is None else Homes(self.before)


def _replaced(tenant: str, shares: Shares, count: int) -> Shares:
    """Return shares of which none is in a partition that goes."""
    others = (each for each in _drawn_once(tenant, count) if each not in shares)
    return tuple(each if each < count else next(others) for each in shares)


def _drawn_once(tenant: str, count: int) -> Iterator[int]:
    """Yield each partition of a queue once, in an order of the tenant's own."""
    seen: set[int] = set()
    for number in drawn(tenant, count):
        if number not in seen:
            seen.add(number)
            yield number
        if len(seen) == count:
            return


class PartitionMaps:
    """The maps as one process knows them from the broker, and whether one of them may be out of date.

    The consuming threads write the maps. Any thread may doubt one. A channel that consumes compares
    :attr:`changes` with the value that it has seen, which costs no look-up by name.

    Attributes:
        changes: Grows when a known map has changed, or is in doubt.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._maps: dict[str, PartitionMap] = {}
        self._doubted: set[str] = set()
        self._unanswered: dict[tuple[str, str], list[PartitionMap]] = {}

    def get(self, queue: str) -> PartitionMap | None:
        """Return the map of a queue; None before the first look."""
        return self._maps.get(queue)

    def learn(self, queue: str, stored: PartitionMap) -> None:
        """Note the map that partition 0 of a queue has stored."""
        known = self._maps.get(queue)
        if known != stored:
            self._maps[queue] = stored
            self.changes += known is not None

    def doubt(self, queue: str) -> None:
        """Note that a partition of a queue has stored another map, so that partition 0 must be asked."""
        self._doubted.add(queue)
        self.changes += 1

    def take_doubts(self) -> set[str]:
        """Return the queues whose maps are in doubt, each once."""
        doubted = set()
        while self._doubted:
            doubted.add(self._doubted.pop())
        return doubted

    def note_unanswered(self, queue: str, sequence: str, tried: list[PartitionMap]) -> None:
        """Note the maps by which unconfirmed messages of a producer sequence were sent."""
        self._unanswered[queue, sequence] = tried
        while len(self._unanswered) > MOST_UNANSWERED:
            self._unanswered.pop(next(iter(self._unanswered)), None)

    def take_unanswered(self, queue: str, sequence: str) -> list[PartitionMap]:
        """Return the maps that were noted for a producer sequence, the first one first; forget them."""
        return self._unanswered.pop((queue, sequence), None) or []
