"""``app.dq.dedup``: who has which dedup key, and taking one away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from celery_dq.app.broker import Broker
from celery_dq.dedup.repetition import Repetition, repetition
from celery_dq.inspector import claims
from celery_dq.transport.redis.ids import task_id_of
from celery_dq.transport.tenant import check_tenant


class QueueClaims:
    """The dedup claims of one queue."""

    def __init__(self, broker: Broker, name: str) -> None:
        self.name = name
        self._broker = broker

    def __repr__(self) -> str:
        return f"<dedup claims of queue {self.name!r}>"

    def list(self, limit: int = 100) -> list[claims.ClaimSnapshot]:
        """Up to `limit` keys that somebody has, in no order."""
        with self._broker.open(self.name) as (partition, client):
            return claims.list_claims(partition, client, limit)

    def inspect(self, key: str, *, tenant: str | int = "") -> claims.ClaimSnapshot | None:
        """How a key stands; None when nobody has it."""
        with self._broker.open(self.name) as (partition, client):
            return claims.inspect(partition, client, check_tenant(tenant), key)

    def release(self, key: str, *, tenant: str | int = "") -> str | None:
        """Take a key from its head, so that who waits behind it goes on.

        The head itself is not touched: if it runs, it goes on without a claim, and its fencing token is
        smaller than that of the next run. Revoke it when it is to end.

        Returns:
            The task id of who had the key, None when nobody did.
        """
        with self._broker.open(self.name) as (partition, client):
            head = partition.evict(check_tenant(tenant), key).run(client)
            return task_id_of(head) if head else None

    def verdicts(self) -> dict[str, int]:
        """How often each was given: accept, block, decline, follow, refuse, replace, evict."""
        with self._broker.open(self.name) as (partition, client):
            return claims.verdicts(partition, client)

    def repetition(self, consumers: int, *, sample: int = 1_000) -> Repetition:
        """Whether dedup is worth it in this queue, by what waits in it now.

        Arguments:
            consumers: how many tasks run at a time: workers times concurrency.
            sample: how many waiting messages are looked at.
        """
        with self._broker.open(self.name) as (partition, client):
            return repetition(claims.sample_keys(partition, client, sample), consumers)


class Claims(Mapping[str, QueueClaims]):
    """The dedup claims by queue."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def __getitem__(self, name: str) -> QueueClaims:
        return QueueClaims(self._broker, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._broker.queue_names())

    def __len__(self) -> int:
        return len(self._broker.queue_names())
