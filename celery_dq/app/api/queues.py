"""A queue of ``app.dq.queues``: look at it, cancel messages, move them, forget it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from celery_dq.app.api import message_edits as edits, pauses
from celery_dq.app.api.audit import AuditedChange, OnProgress, ignore_progress
from celery_dq.app.api.broker import OfQueue, OpenQueue
from celery_dq.app.api.cancel import (
    cancel_all_of_tenant,
    cancel_everywhere,
    cancel_found,
    cancellable_of_tenant,
)
from celery_dq.app.api.leaders import Leaders, refuse_singleton
from celery_dq.app.api.map_change import PartitionsChange, set_partitions
from celery_dq.app.api.message_edits import check_changes
from celery_dq.app.api.move import movable, move_chosen
from celery_dq.app.api.tenant_moves import outboxes_delivered
from celery_dq.errors import InvalidRequest
from celery_dq.inspector import messages, queues, tenants
from celery_dq.inspector.backlogs import QueueBacklogs, queue_backlogs
from celery_dq.inspector.explain import Explanation, explain_tenant
from celery_dq.inspector.messages import MessageDetails, message_details
from celery_dq.inspector.queues import Pause
from celery_dq.inspector.redis_values import check_count, check_moment, check_seconds, check_text
from celery_dq.inspector.tenants import TenantPage, TenantSnapshot, TenantState, tenant_page
from celery_dq.keys import quota_field
from celery_dq.transport.redis.store.partition import Cancellation, Edited
from celery_dq.transport.redis.store.whole_queue import former_homes, purge
from celery_dq.transport.tenant import check_priority, check_single_tenant, check_tenant


class QueueApi(OfQueue):
    """One queue. A method makes one or a few round trips, and caches nothing."""

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
        with self._broker.open(self.name) as (partitions, client):
            return queues.queue_snapshot(partitions, client, ages=ages)

    def backlogs(self, largest: int = 0) -> QueueBacklogs:
        """Count the messages that may start now, and find the tenants with the `largest` backlogs."""
        check_count("largest", largest, 0)
        with self._broker.open(self.name) as (partitions, client):
            return queue_backlogs(partitions, client, largest)

    def tenants(self, limit: int = 100) -> list[tenants.TenantSnapshot]:
        """List the tenants that have a backlog; the tenant that is served next comes first."""
        check_count("limit", limit)
        with self._broker.open(self.name) as (partitions, client):
            return tenants.list_tenants(partitions, client, limit)

    def tenant_page(
        self,
        after: str = "",
        *,
        text_in_name: str = "",
        state: TenantState | None = None,
        limit: int = 50,
    ) -> TenantPage:
        """List a part of the tenants that have a backlog; the cost does not depend on their number.

        Args:
            after: The cursor of the part before (``.after``); "" begins.
            text_in_name: Only tenants whose name contains it, in any case of its letters.
            state: Only ``eligible``, ``resource_set``, ``throttled``, ``at_concurrency`` or ``paused`` ones.
            limit: Number of tenants, at most.

        Raises:
            InvalidRequest: `after` is not a cursor, `state` is unknown, or `limit` is out of range.
        """
        check_count("limit", limit)
        with self._broker.open(self.name) as (partitions, client):
            return tenant_page(
                partitions, client, after=after, text_in_name=text_in_name, state=state, limit=limit
            )

    def tenant(self, tenant: str | int) -> TenantSnapshot:
        """The state of one tenant in all of its partitions; ``idle`` without a waiting message."""
        name = check_tenant(tenant)
        with self._broker.open(self.name) as opened:
            return tenants.tenant_total(opened.of(name), opened.client, name)

    def peek(
        self,
        limit: int = 10,
        *,
        tenant: str | int | None = None,
        delayed: bool = False,
        partition: int | None = None,
    ) -> list[messages.MessageSnapshot]:
        """List the next waiting messages, without taking them; with `delayed`, those that wait for their ETA.

        Args:
            limit: Number of messages, at most.
            tenant: Only messages of this tenant.
            delayed: Whether to list the messages that wait for their ETA.
            partition: Only messages in the partition of this number.

        Raises:
            InvalidRequest: `limit` is not between 1 and 1,000,000, `delayed` comes with a tenant, or there
                is no such partition.
        """
        check_count("limit", limit)
        if delayed and tenant is not None:
            raise InvalidRequest("peek: delayed messages cannot be listed by tenant: leave one out")
        name = None if tenant is None else check_tenant(tenant)
        with self._broker.open(self.name) as opened:
            if partition is not None and not 0 <= partition < len(opened.partitions):
                last = len(opened.partitions) - 1
                raise InvalidRequest(f"{self.name!r} has no partition {partition}: give 0 to {last}")
            found = [each for each in opened.of(name) if partition in (None, each.keys.partition)]
            if delayed:
                return messages.peek_delayed(found, opened.client, limit)
            return messages.peek(found, opened.client, limit, name) if found else []

    def has_tenant(self, tenant: str | int) -> bool:
        """Whether a tenant has waiting, running or delayed (read last) messages, or a quota of its own."""
        name = check_tenant(tenant)
        with self._broker.open(self.name) as opened:
            for partition in opened.of(name):
                found = tenants.tenant_snapshot(partition, opened.client, name)
                known = found.waiting or found.running or found.state != "idle"
                known = known or opened.client.hexists(partition.keys.quotas, quota_field(name))
                if known or any(messages.unlisted_ids_of_tenant(partition, opened.client, name)):
                    return True
        return False

    def find(self, task_id: str) -> messages.MessageSnapshot | None:
        """Find a task in this queue; None when it is not here, or has finished."""
        check_text("task_id", task_id)
        with self._broker.open(self.name) as opened:
            return next(iter(messages.find(*opened, task_id)), None)

    def details(self, task_id: str) -> MessageDetails | None:
        """A task in this queue with its headers and times; None when it is not here, or has finished."""
        check_text("task_id", task_id)
        with self._broker.open(self.name) as (partitions, client):
            return message_details(partitions, client, task_id)

    def arguments(self, task_id: str) -> edits.Arguments | None:
        """The arguments of a task in JSON that may be edited; None for any other task."""
        check_text("task_id", task_id)
        with self._broker.open(self.name) as opened:
            return edits.editable_arguments(*opened, task_id)

    def explain(self, tenant: str | int) -> Explanation:
        """Explain why a tenant's work is served or not, and until when."""
        name = check_tenant(tenant)
        with self._broker.open(self.name) as opened:
            homes = [opened.partitions[number] for number in opened.homes.partitions(name)]
            return explain_tenant(homes, opened.client, name)

    # Cancelling. A cancelled message is marked and delivered to a worker for Celery's own bookkeeping (state
    # REVOKED, chords, errbacks), and does not run.

    def cancel(self, task_id: str) -> Cancellation:
        """Cancel a task. A tombstone is not an entry of the audit stream: programs cancel many unknown tasks.

        Returns:
            ``waiting`` or ``delayed``: that was its state, and it will not run. ``claimed``: a worker has
            claimed it, where ``app.control.revoke`` reaches it. ``discarded``: it was cancelled before.
            ``tombstone``: it is not in this queue, and will not run if it is published within
            ``dq_tombstone_ttl``.
        """
        check_text("task_id", task_id)
        ttl_ms = self._broker.options.tombstone_ttl_us // 1000
        with (
            self._broker.open(self.name, declare=True) as opened,
            self._change(opened, "cancelled", details=task_id, bulk=False) as change,
        ):
            ((outcome,),) = cancel_everywhere([opened], [task_id], ttl_ms)
            change.count = int(outcome in ("waiting", "delayed"))
            return outcome

    def cancel_tenant(
        self, tenant: str | int, *, dry_run: bool = False, on_progress: OnProgress = ignore_progress
    ) -> int:
        """Cancel all waiting and delayed messages of a tenant, and return their number.

        Those behind a dedup lock count as waiting.

        Args:
            tenant: The tenant.
            dry_run: Whether to count the messages only.
            on_progress: Called after each chunk with the number of cancelled messages.
        """
        name = check_tenant(tenant)
        with self._broker.open(self.name) as opened:
            homes = opened.of(name)[::-1]  # messages that leave the former home meanwhile are in the new one
            if dry_run:
                return sum(cancellable_of_tenant(each, opened.client, name) for each in homes)
            with self._change(opened, "cancelled", name, on_progress=on_progress) as change:
                for each in homes:
                    cancel_all_of_tenant(each, opened.client, name, change)
            return change.count

    def cancel_task_name(
        self, name: str, *, dry_run: bool = False, on_progress: OnProgress = ignore_progress
    ) -> int:
        """Cancel all waiting and delayed calls of one task name, and return their number.

        Reads the whole queue in chunks. A message that is published during the call may be missed.

        Args:
            name: The name of the task.
            dry_run: Whether to count the messages only.
            on_progress: Called after each chunk with the number of cancelled messages.
        """
        check_text("name", name)
        with self._broker.open(self.name) as opened:
            partitions, client = opened
            if dry_run:
                return sum(messages.cancellable_of_task(each, client, name) for each in partitions)
            audited = self._change(opened, "cancelled", details=f"task {name}", on_progress=on_progress)
            with audited as change:
                for each in (*former_homes(partitions), *partitions):
                    cancel_found(each, client, messages.ids_of_task(each, client, name), change)
            return change.count

    def purge(self, *, dry_run: bool = False, on_progress: OnProgress = ignore_progress) -> int:
        """Remove all waiting, delayed and cancelled messages without a trace, and return their number.

        Messages that workers have claimed stay. The result backend is not informed: the removed tasks stay
        ``PENDING`` there.

        Args:
            dry_run: Whether to count the messages only.
            on_progress: Called after each chunk with the number of removed messages.
        """
        if dry_run:
            now = self.snapshot(ages=False)
            return now.waiting + now.delayed + now.discards
        with (
            self._broker.open(self.name) as opened,
            self._broker.audit.change(opened.client, "purged", self.name, on_progress=on_progress) as change,
        ):
            for removed in purge(former_homes(opened.partitions), opened.client):
                change.add(removed)
            # From here on, a mover takes no more out, and all that it has taken out is found.
            with outboxes_delivered(opened, self._broker.options, wants_all=True):
                for removed in purge(*opened):
                    change.add(removed)
            return change.count

    @contextmanager
    def _change(
        self, opened: OpenQueue, action: str, tenant: str | None = None, *, bulk: bool = True, **more: Any
    ) -> Iterator[AuditedChange]:
        """Write a change to the audit stream at its end. It finds what a killed mover had taken out, too."""
        change = self._broker.audit.change(opened.client, action, self.name, tenant=tenant, **more)
        with change as audited, outboxes_delivered(opened, self._broker.options, wants_all=bulk):
            yield audited

    # Pausing.

    def pause(self, tenant: str | int | None = None, *, until: datetime | timedelta | None = None) -> Pause:
        """Start no more tasks of the queue, or of one tenant. The backlog stays, and running tasks continue.

        Messages are still accepted. The pauses of the queue and of its tenants end separately.

        Args:
            tenant: The tenant; None pauses the whole queue.
            until: When the pause ends by itself, or after which time from now; None: with :meth:`resume`. A
                time without a zone is local time. The clock of the server counts, and no process need run.

        Returns:
            The pause, which keeps its begin when it is set again.

        Raises:
            InvalidRequest: `until` is over already, by the clock of the server.
            InvalidTenant: The tenant is a set of resources.
        """
        name = None if tenant is None else check_single_tenant(tenant, what="pause")
        with self._broker.open(self.name, declare=True) as opened:
            return pauses.pause(self._broker, opened, name, until)

    def resume(self, tenant: str | int | None = None) -> bool:
        """End the pause of the queue, or of one tenant, and return whether there was one."""
        name = None if tenant is None else check_tenant(tenant)
        with self._broker.open(self.name) as opened:
            return pauses.resume(self._broker, opened, name)

    def forget(self) -> bool:
        """Remove the unused queue from the list of queues, and return whether it was there.

        Its quotas stay, and hold again when a client declares the queue. A queue of the settings stays in
        the lists of programs with these settings. A former singleton queue is an ordinary one when it is
        declared again.

        Raises:
            InvalidRequest: The queue has messages, dead letters or consumers, or a worker leads it.
        """
        with self._broker.open(self.name) as (partitions, client):
            _refuse_used(queues.queue_snapshot(partitions, client, ages=False))
            with self._broker.audit.change(client, "forgotten", self.name) as change:
                change.count = int(self._broker.withdraw(client, self.name))
                try:
                    _refuse_used(queues.queue_snapshot(partitions, client, ages=False))
                    Leaders(self._broker).forget(self.name)
                except BaseException:
                    # A message, a consumer or a candidate has come meanwhile, or a server is away.
                    if change.count:
                        self._broker.declare(client, self.name)
                        change.count = 0
                    raise
        return bool(change.count)

    # Partitions.

    def set_partitions(
        self, count: int, *, timeout: float = 60.0, on_progress: OnProgress = ignore_progress
    ) -> PartitionsChange:
        """Change the number of partitions, and move tenants with their messages to their new homes.

        Args:
            count: The new number, 1 to 4096; the same one completes a change. Give it to ``dq_queues``, too.
            timeout: Seconds until running tasks of tenants that move must have ended. What can move at once
                moves in any case.
            on_progress: Called with the number of messages that were moved.

        Raises:
            InvalidRequest: Another change is not complete, the number is out of range, or the queue is a
                singleton queue and gets several.
            TenantMoving: Tasks still run after the time. The same call goes on with the change.
        """
        options = self._broker.options
        return set_partitions(self._broker, options, self.name, count, timeout, on_progress)

    # Editing.

    def reschedule(
        self, task_id: str, *, eta: datetime | None = None, countdown: float | None = None
    ) -> Edited:
        """Change when a waiting or delayed task is due.

        A time that is over means at once. A task that waits already keeps its place then.

        Args:
            task_id: The task.
            eta: When it is due; without a zone it is local time.
            countdown: In how many seconds it is due, by the clock of the server; instead of `eta`.

        Returns:
            ``delayed`` or ``waiting``: its state now, which is ``delayed`` until the next claim for one that
            was delayed and is due. ``other``: nothing was changed, because a worker has it, or it is
            discarded, or waits for a dedup lock. ``none``: it is not in this queue.

        Raises:
            InvalidRequest: Not exactly one of `eta` and `countdown` is given, or it is out of range, or the
                task expires before.
        """
        if (eta is None) == (countdown is None):
            raise InvalidRequest("reschedule: give exactly one of eta=… and countdown=…")
        if eta is not None:
            at = partial(edits.edit_place, due_us=check_moment("eta", eta))
            return self._edit("rescheduled", task_id, eta.isoformat(), at)
        later = partial(edits.edit_place, for_us=round(check_seconds("countdown", countdown) * 1e6))
        return self._edit("rescheduled", task_id, f"{countdown:g} s", later)

    def reprioritise(self, task_id: str, priority: int) -> Edited:
        """Change the priority of a waiting or delayed task; it keeps its place by time within the new one.

        Args:
            task_id: The task.
            priority: 0 to 9; higher is more urgent.

        Returns:
            See :meth:`reschedule`.
        """
        new = check_priority(priority)
        return self._edit("reprioritised", task_id, str(new), partial(edits.edit_place, priority=new))

    def edit(self, task_id: str, **changes: Any) -> Edited:
        """Change the arguments of a task that waits. One that a worker has is never changed.

        Dedup key, tenant and place stay as they are, also where they were made of the arguments.

        Args:
            task_id: The task, which waits, is delayed, or waits for a dedup lock.
            changes: ``args`` (a list) or ``kwargs`` (a dict with texts as keys), or both.

        Returns:
            See :meth:`reschedule`; ``blocked`` is a change, too.

        Raises:
            InvalidMessage: A change is unknown, the arguments do not fit the task's signature, or the body's
                content type is not in ``accept_content``.
        """
        check_changes(changes, ("args", "kwargs"))
        accept, tasks = self._broker.accept_content, self._broker.app.tasks
        edit = partial(edits.edit_arguments, changes=changes, accept=accept, tasks=tasks)
        return self._edit("edited", task_id, ", ".join(sorted(changes)), edit)

    def _edit(self, action: str, task_id: str, new: str, edit: edits.EditMessage) -> Edited:
        check_text("task_id", task_id)
        with (
            self._broker.open(self.name) as opened,
            self._change(opened, action, details=f"{task_id}: {new}", bulk=False) as change,
        ):
            outcome = edit(*opened, task_id)
            change.count = int(outcome in edits.CHANGED)
            return outcome

    # Moving.

    def move(
        self,
        to: str,
        *,
        task_id: str | None = None,
        tenant: str | int | None = None,
        dry_run: bool = False,
        on_progress: OnProgress = ignore_progress,
    ) -> int:
        """Move one task, or all waiting messages of a tenant, to the end of another queue.

        A message is never lost: it is under a lease while it moves. If this process dies, the same call again
        doubles none. Without it, up to 200 messages wait here again after ten minutes, and may be in both
        queues.

        Args:
            to: The name of the destination.
            task_id: The task to move.
            tenant: The tenant whose waiting messages move.
            dry_run: Whether to count the messages only.
            on_progress: Called after each chunk with the number of moved messages.

        Returns:
            How many messages moved. A message that a worker has claimed by then stays.

        Raises:
            InvalidRequest: Not exactly one of `task_id` and `tenant` is given, `to` is this queue, or this is
                a singleton queue.
        """
        if (task_id is None) == (tenant is None):
            raise InvalidRequest("move: give exactly one of task_id=… and tenant=…")
        check_text("to", to)
        if task_id is not None:
            check_text("task_id", task_id)
        if to == self.name:
            raise InvalidRequest(f"move: {to!r} is the source itself; name another queue")
        head_start = self._broker.options.queue(to).head_start_us
        name = None if tenant is None else check_tenant(tenant)
        with self._broker.open_all([self.name, to], declare=not dry_run) as (source, destination):
            refuse_singleton(source.partitions[0], source.client, "of which only the leader takes messages")
            if dry_run:
                return movable(source, task_id, name)
            self._broker.declare(source.client, to)
            details = f"to {to}" if task_id is None else f"to {to}: {task_id}"
            bulk = task_id is None
            audited = self._change(source, "moved", name, bulk=bulk, details=details, on_progress=on_progress)
            with audited as change:
                move_chosen(source, destination, task_id, name, head_start, change)
            return change.count


def _refuse_used(found: queues.QueueSnapshot) -> None:
    messages = found.waiting + found.delayed + found.discards + found.held
    consumers = [each.name for each in found.consumers if each.is_alive]
    counts = {"messages": messages, "dead letters": found.dead, "consumers": len(consumers)}
    used = ", ".join(f"{noun}: {count}" for noun, count in counts.items() if count)
    if used:
        raise InvalidRequest(f"{found.name!r} is in use ({used}), and is not forgotten")
