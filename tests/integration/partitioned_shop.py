"""A queue with four partitions, one tenant for each of them, and a worker that consumes one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.integration.shop import send

COUNT = 4
#: One tenant for each partition, in the order of their numbers.
A, B, C, D = TENANTS = ["shop-11", "shop-3", "shop-26", "shop-13"]
#: Another tenant of partition 0.
A2 = "shop-7"


def killed(*_: Any, **__: Any) -> None:
    """Stand for a function before which its process is killed."""
    raise KeyboardInterrupt


@contextmanager
def opened(app: Any) -> Iterator[Any]:
    """All partitions, and a client."""
    with app.dq._broker.open("push") as found:
        yield found


def claim_in(app: Any, tenant: str, want: int = 1) -> list[Any]:
    """Claim messages in the home of a tenant, as a worker that consumes it."""
    with app.dq._broker.open_home("push", tenant) as (partition, client):
        return list(partition.claim("worker:1", lease_ms=60_000, want=want).run(client).entries)


def dead_letter_of(app: Any, tenant: str) -> str:
    """Publish a message of a tenant and dead-letter it; return its id."""
    (task_id,) = send(app, tenant)
    (entry,) = claim_in(app, tenant)
    with app.dq._broker.open_home("push", tenant) as (partition, client):
        partition.dead_letter("worker:1", entry.tag, reason="rejected", worker="worker:1").run(client)
    return task_id


def tombstones(app: Any) -> list[int]:
    """The number of tombstones in each partition."""
    with opened(app) as (partitions, client):
        return [client.zcard(each.keys.tombstones) for each in partitions]
