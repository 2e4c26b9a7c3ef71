"""A queue of ``app.dq.queues``: look at it, cancel messages, move them."""

from __future__ import annotations

from collections.abc import Iterable

from celery_dq.app.api.broker import BrokerAccess, OpenPartition
from celery_dq.app.api.move import Mover
from celery_dq.context import AppContext
from celery_dq.errors import InvalidRequest
from celery_dq.inspector import messages, queues, tenants
from celery_dq.inspector.explain import Explanation, explain_tenant
from celery_dq.inspector.redis_values import check_count, check_text
from celery_dq.keys import quota_field
from celery_dq.transport.redis.store.replies import Cancellation
from celery_dq.transport.tenant import check_tenant

#: Ids in one call of the ``cancel`` script.
_CHUNK = 100


class QueueApi:
    """One queue. A method makes one or a few round trips, and caches nothing."""

    def __init__(self, broker: BrokerAccess, context: AppContext, name: str) -> None:
        self.name = name
        self._broker = broker
        self._context = context

    def __repr__(self) -> str:
        return f"<queue {self.name!r}>"

    # Reading.

    @property
    def depth(self) -> int:
        """How many messages wait or are delayed."""
        now = self.snapshot(ages=False)
        return now.waiting + now.delayed

    def snapshot(self, *, ages: bool = True) -> queues.QueueSnapshot:
        """The state of the queue; without `ages`, the oldest waiting message is not looked for."""
        with self._broker.open(self.name) as (partition, client):
            return queues.queue_snapshot(partition, client, ages=ages)

    def tenants(self, limit: int = 100) -> list[tenants.TenantSnapshot]:
        """List the tenants that have a backlog; the tenant that is served next comes first."""
        check_count("limit", limit)
        with self._broker.open(self.name) as (partition, client):
            return tenants.list_tenants(partition, client, limit)

    def peek(
        self, limit: int = 10, *, tenant: str | int | None = None, delayed: bool = False
    ) -> list[messages.MessageSnapshot]:
        """List the next waiting messages, without taking them; with `delayed`, those that wait for their ETA.

        Raises:
            InvalidRequest: `limit` is no number from 1 to 1,000,000, or `delayed` comes with a tenant.
        """
        check_count("limit", limit)
        if delayed and tenant is not None:
            raise InvalidRequest(
                "peek: delayed messages cannot be listed by tenant; leave out delayed or tenant"
            )
        with self._broker.open(self.name) as (partition, client):
            if delayed:
                return messages.peek_delayed(partition, client, limit)
            name = None if tenant is None else check_tenant(tenant)
            return messages.peek(partition, client, limit, name)

    def has_tenant(self, tenant: str | int) -> bool:
        """Whether a tenant has waiting, delayed or running messages, or a quota of its own.

        Reads the delayed messages of the queue in chunks if the tenant has none of the others.
        """
        name = check_tenant(tenant)
        with self._broker.open(self.name) as opened:
            found = tenants.tenant_snapshot(*opened, name)
            if found.state != "idle" or found.running or found.waiting:
                return True
            if opened.client.hexists(opened.partition.keys.quotas, quota_field(name)):
                return True
            return any(messages.delayed_ids_of_tenant(*opened, name))

    def find(self, task_id: str) -> messages.MessageSnapshot | None:
        """Find a task in this queue; None when it is not here, or has finished."""
        check_text("task_id", task_id)
        with self._broker.open(self.name) as (partition, client):
            return messages.find(partition, client, task_id)

    def explain(self, tenant: str | int) -> Explanation:
        """Explain why a tenant's work is served or not, and until when."""
        with self._broker.open(self.name) as (partition, client):
            return explain_tenant(partition, client, check_tenant(tenant))

    # Cancelling. A cancelled message is marked and delivered to a worker for Celery's own bookkeeping (state
    # REVOKED, chords, errbacks), and does not run.

    def cancel(self, task_id: str) -> Cancellation:
        """Cancel a task.

        Returns:
            ``waiting`` or ``delayed``: that was its state, and it will not run. ``claimed``: a worker has
            claimed it, where ``app.control.revoke`` reaches it. ``discarded``: it was cancelled before.
            ``tombstone``: it is not in this queue, and will not run if it is published within
            ``dq_tombstone_ttl``.
        """
        check_text("task_id", task_id)
        with self._broker.open(self.name) as opened:
            return self._cancelled(opened, [task_id], self._context.options.tombstone_ttl_us // 1000)[0]

    def cancel_tenant(self, tenant: str | int) -> int:
        """Cancel all waiting and delayed messages of a tenant, and return their number."""
        name = check_tenant(tenant)
        count = 0
        with self._broker.open(self.name) as opened:
            remaining = 1
            while remaining:
                moved, remaining = opened.partition.cancel_tenant(name).run(opened.client)
                count += moved
                if not moved:
                    break
            return count + self._cancel_found(opened, messages.delayed_ids_of_tenant(*opened, name))

    def cancel_task_name(self, name: str) -> int:
        """Cancel all waiting and delayed calls of one task name, and return their number.

        Reads the whole queue in chunks. A message that is published during the call may be missed.
        """
        check_text("name", name)
        with self._broker.open(self.name) as opened:
            return self._cancel_found(opened, messages.ids_of_task(*opened, name))

    def purge(self) -> int:
        """Remove all waiting, delayed and cancelled messages without a trace, and return their number.

        Messages that workers have claimed stay. The result backend is not informed: the removed tasks stay
        ``PENDING`` there.
        """
        count = 0
        with self._broker.open(self.name) as (partition, client):
            while True:
                removed, more = partition.purge().run(client)
                count += removed
                if not more or not removed:
                    return count

    def _cancel_found(self, opened: OpenPartition, chunks: Iterable[list[str]]) -> int:
        count = 0
        for found in chunks:
            chunk = list(dict.fromkeys(found))
            for start in range(0, len(chunk), _CHUNK):
                outcomes = self._cancelled(opened, chunk[start : start + _CHUNK], 0)
                count += sum(outcome in ("waiting", "delayed") for outcome in outcomes)
        return count

    def _cancelled(self, opened: OpenPartition, ids: list[str], tombstone_ttl_ms: int) -> list[Cancellation]:
        return opened.partition.cancel(ids, tombstone_ttl_ms=tombstone_ttl_ms).run(opened.client)

    # Moving.

    def move(self, to: str, *, task_id: str | None = None, tenant: str | int | None = None) -> int:
        """Move one task, or all waiting messages of a tenant, to the end of another queue.

        A message is never lost: it is under a lease while it moves. If this process dies between the two
        steps, the message is in both queues.

        Args:
            to: The name of the destination.
            task_id: The task to move.
            tenant: The tenant whose waiting messages move.

        Returns:
            How many messages moved. A message that a worker has claimed by then stays.

        Raises:
            InvalidRequest: Not exactly one of `task_id` and `tenant` is given, or `to` is this queue.
        """
        if (task_id is None) == (tenant is None):
            raise InvalidRequest("move: give exactly one of task_id=… and tenant=…")
        check_text("to", to)
        if task_id is not None:
            check_text("task_id", task_id)
        if to == self.name:
            raise InvalidRequest(f"move: {to!r} is the source itself; name another queue")
        head_start = self._context.options.queue(to).head_start_us
        with self._broker.channel() as channel:
            self._broker.declare(channel, to)
            mover = Mover(channel.partition(self.name), channel.partition(to), channel.client, head_start)
            if task_id is not None:
                found = messages.find(channel.partition(self.name), channel.client, task_id)
                return mover.move([found.id]) if found is not None else 0
            return mover.move_tenant(check_tenant(tenant))
