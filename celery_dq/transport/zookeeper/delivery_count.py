"""The delivery count of a message: how often it was taken, and how many of its consumers were lost.

A crashed consumer cannot record its crash, so the other two events are counted instead:

* The transaction that locks an item also creates a child of the item and deletes it again. No node stays, but
  the item's ``cversion`` grows.
* The transaction that unlocks a requeued item also writes the same data again. The item's ``version`` grows.

The difference is the number of lost consumers. Both counts are part of the item's stat: they end with the
item, and Java peers are not affected, because they use only name and data.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from celery_dq.zookeeper.transaction import Step, create, delete

#: Name of the child that is created and deleted in one transaction.
MARK = "taken"


class DeliveryCount(NamedTuple):
    """The counts in the stat of an item that was just taken.

    Attributes:
        taken: How often the item was taken, including this time.
        deliveries: How many earlier deliveries ended with a crash or an expired session.
    """

    taken: int
    deliveries: int


def count_steps(item: str) -> list[Step]:
    """Return the steps that count a delivery of the item."""
    mark = f"{item}/{MARK}"
    return [create(mark), delete(mark)]


def count_of(stat: Any) -> DeliveryCount:
    """Read both counts; they are too low for an item that an older release without counts has taken."""
    # The server's ``cversion`` is twice the children ever created, minus those that exist now.
    taken = (stat.cversion + stat.numChildren) // 2
    return DeliveryCount(taken, max(taken - 1 - stat.version, 0))
