"""How often a message was taken, and how often whoever had it was lost.

Nobody is left to write down that a consumer has crashed, so what is written down is the opposite. Whoever
takes an item also makes a child of it and deletes the child again, in the transaction that makes the lock:
nothing stays, but the item's ``cversion`` has counted. Whoever gives an item back in good order writes its
data anew, the same bytes, in the transaction that deletes the lock: its ``version`` has counted. What was
taken more often than it was given back, has had its consumers lost. Both counts are part of the item: they go
when it goes, and Java peers, who look at name and data only, see nothing of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from celery_dq.zookeeper.transaction import Step, create, delete

#: The child that is never seen.
MARK = "taken"


class Count(NamedTuple):
    """What an item's stat says, to whoever has just taken it.

    Attributes:
        taken: how often it was taken, this time included.
        deliveries: how many of those before ended in a crash, or with an expired session.
    """

    taken: int
    deliveries: int


def count_steps(item: str) -> list[Step]:
    """What counts that the item is taken."""
    mark = f"{item}/{MARK}"
    return [create(mark), delete(mark)]


def count_of(stat: Any) -> Count:
    """Read both counts; an item that was taken by a release without counts may show too few."""
    # The server reports twice the children that were ever made, less those that are there.
    taken = (stat.cversion + stat.numChildren) // 2
    return Count(taken, max(taken - 1 - stat.version, 0))
