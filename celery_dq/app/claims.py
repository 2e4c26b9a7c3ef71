"""``app.dq.dedup``: who has which dedup key, and taking one away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from celery_dq.app.broker import Broker
from celery_dq.dedup.coordinator import ClaimSnapshot as Coordinated, Coordinator
from celery_dq.dedup.repetition import Repetition, repetition
from celery_dq.dedup.server import OwnRedis, redis_of
from celery_dq.errors import ConfigurationError, InvalidRequest
from celery_dq.hooks import Wires
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


class CoordinatedClaims:
    """The dedup claims of one queue of a broker that gives no verdicts: its workers share a coordinator."""

    def __init__(self, app: Any, wires: Wires, name: str) -> None:
        self.name = name
        self._app = app
        self._wires = wires

    def __repr__(self) -> str:
        return f"<dedup claims of queue {self.name!r}, by a coordinator>"

    @contextmanager
    def _asked(self) -> Iterator[Coordinator]:
        local = self._wires.coordinator
        if local is not None:
            yield local
            return
        coordinator = OwnRedis(redis_of(self._app, self._wires.options), self._wires.options, "")
        try:
            yield coordinator
        finally:
            coordinator.close()

    def _key(self, key: str, tenant: str | int) -> str:
        if check_tenant(tenant):
            raise InvalidRequest(
                f"tenant={tenant!r}: only on a broker of celery-dq have dedup keys a tenant; leave it out"
            )
        return f"{self.name}|{key}"

    def list(self, limit: int = 100) -> list[claims.ClaimSnapshot]:
        """See :meth:`QueueClaims.list`. Scans the Redis that keeps the claims."""
        found: list[claims.ClaimSnapshot] = []
        with self._asked() as coordinator:
            for key in coordinator.keys(f"{self.name}|"):
                snapshot = self._snapshot(coordinator.inspect(key)) if len(found) < limit else None
                if snapshot is not None:
                    found.append(snapshot)
        return found

    def inspect(self, key: str, *, tenant: str | int = "") -> claims.ClaimSnapshot | None:
        """See :meth:`QueueClaims.inspect`."""
        with self._asked() as coordinator:
            return self._snapshot(coordinator.inspect(self._key(key, tenant)))

    def release(self, key: str, *, tenant: str | int = "") -> str | None:
        """See :meth:`QueueClaims.release`. Who waits behind it asks for the key anew."""
        with self._asked() as coordinator:
            freed = self._snapshot(coordinator.free(self._key(key, tenant)))
            return freed.head if freed is not None else None

    def verdicts(self) -> dict[str, int]:
        """How often each was given: accept, block, decline, replace, evict."""
        with self._asked() as coordinator:
            return coordinator.verdicts(self.name)

    def repetition(self, consumers: int, *, sample: int = 1_000) -> Repetition:
        """Not to be had: what waits can only be looked at on a broker of celery-dq.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            f"repetition of queue {self.name!r}: the waiting messages of this broker cannot be looked at; "
            "pass a log of your own to celery_dq.dedup.repetition.repetition(keys, consumers), or use dq-redis://…"
        )

    def _snapshot(self, found: Coordinated | None) -> claims.ClaimSnapshot | None:
        if found is None or found.head is None:
            return None
        head = found.head
        head_task, heir_task, tail_task = (
            "" if each is None else each.call.partition("/")[0] for each in (head, found.heir, found.tail)
        )
        return claims.ClaimSnapshot(
            tenant="",
            key=found.key.partition("|")[2],
            head=head_task,
            heir=heir_task,
            tail=tail_task,
            running=head.token > 0,
            token=head.token,
            age_s=max(head.age, 0.0) if head.token else 0.0,
            timeout_s=head.timeout,
            followers=head.followers,
            worker=head.owner,
        )


class Claims(Mapping[str, "QueueClaims | CoordinatedClaims"]):
    """The dedup claims by queue."""

    def __init__(self, app: Any, broker: Broker, wires: Wires) -> None:
        self._app = app
        self._broker = broker
        self._wires = wires

    def __getitem__(self, name: str) -> QueueClaims | CoordinatedClaims:
        if self._broker.serves_queues():
            return QueueClaims(self._broker, name)
        return CoordinatedClaims(self._app, self._wires, name)

    def _names(self) -> list[str]:
        return self._broker.queue_names() if self._broker.serves_queues() else sorted(self._app.amqp.queues)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())
