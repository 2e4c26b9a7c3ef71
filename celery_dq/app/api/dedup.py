"""``app.dq.dedup``: list and release dedup locks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from celery_dq.app.api.broker import BrokerAccess, ByQueueName, OfQueue
from celery_dq.dedup.machine import Coordinator, CoordinatorLockSnapshot as Coordinated
from celery_dq.dedup.repetition import Repetition, repetition
from celery_dq.errors import ConfigurationError, InvalidRequest
from celery_dq.inspector import dedup_locks
from celery_dq.inspector.redis_values import check_count, check_text
from celery_dq.other_brokers.redis_coordinator import OwnRedis, redis_of
from celery_dq.transport.redis.store.message_ids import task_id_of
from celery_dq.transport.redis.store.rounds import AT_ONCE
from celery_dq.transport.tenant import check_tenant


class QueueDedup(OfQueue):
    """The dedup locks of one queue."""

    def __repr__(self) -> str:
        return f"<dedup locks of queue {self.name!r}>"

    def list(self, limit: int = 100) -> list[dedup_locks.DedupLockSnapshot]:
        """List up to `limit` dedup locks, in no order."""
        check_count("limit", limit)
        with self._broker.open(self.name) as (partitions, client):
            return dedup_locks.list_dedup_locks(partitions, client, limit)

    def inspect(self, key: str, *, tenant: str | int = "") -> dedup_locks.DedupLockSnapshot | None:
        """The state of a key's dedup lock; None when no call holds it."""
        check_text("key", key)
        name = check_tenant(tenant)
        with self._broker.open(self.name) as opened:
            found = [dedup_locks.inspect(each, opened.client, name, key) for each in opened.of_key(name, key)]
            return next((each for each in found if each is not None), None)

    def release(self, key: str, *, tenant: str | int = "") -> str | None:
        """Take the dedup lock from the head of a key, so that the next waiting call may run.

        The head is not stopped: if it runs, it continues without the lock, and its fencing token is smaller
        than that of the next run. Revoke the task to end it.

        Args:
            key: The dedup key.
            tenant: The tenant of the key.

        Returns:
            The task id of the call that held the lock, None when no call did.
        """
        check_text("key", key)
        name = check_tenant(tenant)
        with (
            self._broker.open(self.name) as opened,
            # The key may hold arguments of the call.
            self._broker.audit.change(opened.client, "dedup_evicted", self.name, tenant=name) as change,
        ):
            heads = [each.evict(name, key).run(opened.client) for each in opened.of_key(name, key)]
            head = next(filter(None, heads), "")
            change.count, change.details = int(bool(head)), task_id_of(head)
            return change.details or None

    def verdicts(self) -> dict[str, int]:
        """How often each verdict was given: accept, block, decline, follow, refuse, replace, evict."""
        with self._broker.open(self.name) as opened:
            return dedup_locks.verdicts([opened.partitions], opened.client)[0]

    def repetition(self, consumers: int, *, sample: int = 1_000) -> Repetition:
        """Estimate from the waiting messages whether dedup is worth its cost in this queue.

        Args:
            consumers: how many tasks run at a time: workers times concurrency.
            sample: how many waiting messages are looked at.
        """
        check_count("consumers", consumers)
        check_count("sample", sample)
        with self._broker.open(self.name) as (partitions, client):
            return repetition(dedup_locks.sample_keys(partitions, client, sample), consumers)


@contextmanager
def _coordinator(broker: BrokerAccess) -> Iterator[Coordinator]:
    local = broker.context.coordinator
    if local is not None:
        yield local
        return
    coordinator = OwnRedis(redis_of(broker.app, broker.options), broker.options, "")
    try:
        yield coordinator
    finally:
        coordinator.close()


class CoordinatedDedup(OfQueue):
    """The dedup locks of one queue of a broker that gives no verdicts. Its workers share a coordinator."""

    def __repr__(self) -> str:
        return f"<dedup locks of queue {self.name!r}, by a coordinator>"

    def _key(self, key: str, tenant: str | int) -> str:
        check_text("key", key)
        if check_tenant(tenant):
            raise InvalidRequest(
                f"tenant={tenant!r}: dedup keys have a tenant only on a broker of celery-dq; leave it out"
            )
        return f"{self.name}|{key}"

    def list(self, limit: int = 100) -> list[dedup_locks.DedupLockSnapshot]:
        """See :meth:`QueueDedup.list`. Scans the Redis that keeps the dedup locks."""
        check_count("limit", limit)
        found: list[dedup_locks.DedupLockSnapshot] = []
        with _coordinator(self._broker) as coordinator:
            for key in coordinator.keys(f"{self.name}|"):
                snapshot = self._snapshot(coordinator.inspect(key)) if len(found) < limit else None
                if snapshot is not None:
                    found.append(snapshot)
        return found

    def inspect(self, key: str, *, tenant: str | int = "") -> dedup_locks.DedupLockSnapshot | None:
        """See :meth:`QueueDedup.inspect`."""
        with _coordinator(self._broker) as coordinator:
            return self._snapshot(coordinator.inspect(self._key(key, tenant)))

    def release(self, key: str, *, tenant: str | int = "") -> str | None:
        """See :meth:`QueueDedup.release`. A waiting call requests the lock again."""
        with _coordinator(self._broker) as coordinator:
            freed = self._snapshot(coordinator.free(self._key(key, tenant)))
            return freed.head if freed is not None else None

    def verdicts(self) -> dict[str, int]:
        """How often each verdict was given: accept, block, decline, replace, evict."""
        with _coordinator(self._broker) as coordinator:
            return coordinator.verdicts(self.name)

    def repetition(self, consumers: int, *, sample: int = 1_000) -> Repetition:
        """Refuse: only a broker of celery-dq can show its waiting messages.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            f"repetition of queue {self.name!r}: the waiting messages of this broker cannot be looked at; "
            "give a log of your own (celery dq dedup repetition --log), or use dq-redis://…"
        )

    def _snapshot(self, found: Coordinated | None) -> dedup_locks.DedupLockSnapshot | None:
        if found is None or found.head is None:
            return None
        head = found.head
        head_task, heir_task, tail_task = (
            "" if each is None else each.call.partition("/")[0] for each in (head, found.heir, found.tail)
        )
        return dedup_locks.DedupLockSnapshot(
            tenant="",
            key=found.key.partition("|")[2],
            head=head_task,
            heir=heir_task,
            tail=tail_task,
            running=head.token > 0,
            token=head.token,
            age_s=max(head.age, 0.0) if head.token else None,
            timeout_s=head.timeout,
            followers=head.followers,
            worker=head.owner,
        )


class DedupApi(ByQueueName[QueueDedup | CoordinatedDedup]):
    """The dedup locks by queue."""

    def _of(self, name: str) -> QueueDedup | CoordinatedDedup:
        return (QueueDedup if self._broker.serves_queues() else CoordinatedDedup)(self._broker, name)

    def verdicts(self, *names: str) -> list[dict[str, int]]:
        """How often each verdict was given in queues, which share round trips, or a connection."""
        if not self._broker.serves_queues():
            with _coordinator(self._broker) as coordinator:
                return [coordinator.verdicts(name) for name in names]
        found: list[dict[str, int]] = []
        for start in range(0, len(names), AT_ONCE):
            with self._broker.open_all(names[start : start + AT_ONCE]) as opened:
                found += dedup_locks.verdicts([each.partitions for each in opened], opened[0].client)
        return found

    def _names(self) -> list[str]:
        return super()._names() if self._broker.serves_queues() else sorted(self._broker.app.amqp.queues)
