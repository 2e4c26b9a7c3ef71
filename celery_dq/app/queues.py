"""``app.dq.queues``: look at the queues, take messages back, move them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from celery_dq.app.broker import Broker, Opened
from celery_dq.app.moving import Mover
from celery_dq.errors import InvalidRequest
from celery_dq.hooks import Wires
from celery_dq.inspector import messages, queues, tenants
from celery_dq.inspector.explain import Explanation, explain_tenant
from celery_dq.transport.redis.replies import Cancellation
from celery_dq.transport.tenant import check_tenant

#: Ids in one call of the ``cancel`` script.
_CHUNK = 100


class QueueFace:
    """One queue. Every method is one or a few round trips; nothing is kept."""

    def __init__(self, broker: Broker, wires: Wires, name: str) -> None:
        self.name = name
        self._broker = broker
        self._wires = wires

    def __repr__(self) -> str:
        return f"<queue {self.name!r}>"

    # Reading.

    @property
    def depth(self) -> int:
        """How many messages wait or are delayed."""
        now = self.snapshot()
        return now.waiting + now.delayed

    def snapshot(self) -> queues.QueueSnapshot:
        """How the queue stands."""
        with self._broker.open(self.name) as (partition, client):
            return queues.queue_snapshot(partition, client)

    def tenants(self, limit: int = 100) -> list[tenants.TenantSnapshot]:
        """The tenants that have a backlog, the next one served first."""
        with self._broker.open(self.name) as (partition, client):
            return tenants.list_tenants(partition, client, limit)

    def peek(
        self, limit: int = 10, *, tenant: str | int | None = None, delayed: bool = False
    ) -> list[messages.MessageSnapshot]:
        """What waits next, without taking it; with `delayed`, what waits for its ETA."""
        with self._broker.open(self.name) as (partition, client):
            if delayed:
                return messages.peek_delayed(partition, client, limit)
            name = None if tenant is None else check_tenant(tenant)
            return messages.peek(partition, client, limit, name)

    def find(self, task_id: str) -> messages.MessageSnapshot | None:
        """Where a task is in this queue; None when it is not here, or has finished."""
        with self._broker.open(self.name) as (partition, client):
            return messages.find(partition, client, task_id)

    def explain(self, tenant: str | int) -> Explanation:
        """Why a tenant's work is or is not served, and until when."""
        with self._broker.open(self.name) as (partition, client):
            return explain_tenant(partition, client, check_tenant(tenant))

    # Taking back. What is cancelled is handed, flagged, to a worker for Celery's own bookkeeping
    # (state REVOKED, chords, errbacks) and does not run.

    def cancel(self, task_id: str) -> Cancellation:
        """Cancel a task.

        Returns:
            ``waiting`` or ``delayed``: it was, and will not run. ``claimed``: a worker has it already;
            ``app.control.revoke`` reaches it there. ``discarded``: it had been cancelled before.
            ``tombstone``: it is not here; should it be published within ``dq_tombstone_ttl``, it will
            not run.
        """
        with self._broker.open(self.name) as opened:
            return self._cancelled(opened, [task_id], self._wires.options.tombstone_ttl_us // 1000)[0]

    def cancel_tenant(self, tenant: str | int) -> int:
        """Cancel all that waits or is delayed for a tenant; returns how many messages."""
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
        """Cancel all that waits or is delayed of one task name; returns how many tasks.

        Reads the whole queue in chunks; what is published meanwhile may or may not be found.
        """
        with self._broker.open(self.name) as opened:
            return self._cancel_found(opened, messages.ids_of_task(*opened, name))

    def purge(self) -> int:
        """Remove all that waits, is delayed or was cancelled, unrecorded; returns how many messages.

        What workers have stays. Nobody tells the result backend: the tasks stay ``PENDING`` there.
        """
        count = 0
        with self._broker.open(self.name) as (partition, client):
            while True:
                removed, more = partition.purge().run(client)
                count += removed
                if not more or not removed:
                    return count

    def _cancel_found(self, opened: Opened, chunks: Iterable[list[str]]) -> int:
        count = 0
        for found in chunks:
            chunk = list(dict.fromkeys(found))
            for start in range(0, len(chunk), _CHUNK):
                outcomes = self._cancelled(opened, chunk[start : start + _CHUNK], 0)
                count += sum(outcome in ("waiting", "delayed") for outcome in outcomes)
        return count

    def _cancelled(self, opened: Opened, ids: list[str], tombstone_ttl_ms: int) -> list[Cancellation]:
        return opened.partition.cancel(ids, tombstone_ttl_ms=tombstone_ttl_ms).run(opened.client)

    # Moving.

    def move(self, to: str, *, task_id: str | None = None, tenant: str | int | None = None) -> int:
        """Move one task, or all that waits for a tenant, to the end of another queue.

        A message is in the one queue or the other at any time, and is never lost: it is held under a
        lease while it moves. When this process dies between the two steps, the message is in both.

        Returns:
            How many messages moved: those that a worker has taken meanwhile stay.

        Raises:
            InvalidRequest: Not exactly one of `task_id` and `tenant` is given, or `to` is this queue.
        """
        if (task_id is None) == (tenant is None):
            raise InvalidRequest("move: say what: task_id=… or tenant=…, one of them")
        if to == self.name:
            raise InvalidRequest(f"move: {to!r} is the queue itself")
        head_start = self._wires.options.queue(to).head_start_us
        with self._broker.channel() as channel:
            self._broker.declare(channel, to)
            mover = Mover(channel.partition(self.name), channel.partition(to), channel.client, head_start)
            if task_id is not None:
                found = messages.find(channel.partition(self.name), channel.client, task_id)
                return mover.move([found.id]) if found is not None else 0
            return mover.move_tenant(check_tenant(tenant))


class Queues(Mapping[str, QueueFace]):
    """The queues by name. Any name may be asked for: a queue begins to exist with its first message."""

    def __init__(self, broker: Broker, wires: Wires) -> None:
        self._broker = broker
        self._wires = wires

    def __getitem__(self, name: str) -> QueueFace:
        if not isinstance(name, str) or not name:
            raise KeyError(name)
        return QueueFace(self._broker, self._wires, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._broker.queue_names())

    def __len__(self) -> int:
        return len(self._broker.queue_names())

    def __contains__(self, name: Any) -> bool:
        return name in self._broker.queue_names()
