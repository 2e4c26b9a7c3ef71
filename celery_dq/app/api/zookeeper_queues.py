"""``app.dq.queues`` on the ZooKeeper broker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice

from celery_dq.app.api.progress import OnProgress, ignore_progress
from celery_dq.app.api.queues import QueueApi
from celery_dq.errors import InvalidRequest
from celery_dq.inspector.messages import MessageSnapshot
from celery_dq.inspector.queues import ZooKeeperQueueSnapshot
from celery_dq.inspector.redis_values import check_count, check_text
from celery_dq.inspector.zookeeper_queues import (
    StoredItem,
    delayed_items,
    find_item,
    queue_counts,
    ready_items,
)
from celery_dq.transport.redis.store.replies import Cancellation
from celery_dq.transport.zookeeper.queues import ANSWER_S, ZooKeeperQueues
from celery_dq.zookeeper.transaction import Step, TransactionRefused, create, delete, transact

#: Attempts to remove a message that moves meanwhile, as a delayed one does when it is due.
_ATTEMPTS = 3


class ZooKeeperQueueApi(QueueApi):
    """One queue in ZooKeeper. Methods that need tenants raise ``ConfigurationError``."""

    def snapshot(self, *, ages: bool = True) -> ZooKeeperQueueSnapshot:  # type: ignore[override]  # no tenants
        """The counts of the queue; there are no ages."""
        with self._queues() as queues:
            return queue_counts(queues, self.name)

    def peek(
        self,
        limit: int = 10,
        *,
        tenant: str | int | None = None,
        delayed: bool = False,
        partition: int | None = None,
    ) -> list[MessageSnapshot]:
        """List the next waiting messages, without taking them; with `delayed`, those that wait for their ETA.

        Raises:
            InvalidRequest: `limit` is not between 1 and 1,000,000, or a tenant or a partition is given.
        """
        check_count("limit", limit)
        if tenant is not None:
            raise InvalidRequest("peek: a queue in ZooKeeper has no tenants; leave out tenant")
        if partition is not None:
            raise InvalidRequest(f"peek: a queue in ZooKeeper has no partitions; name {self.name!r}")
        with self._queues() as queues:
            items = delayed_items(queues, self.name) if delayed else ready_items(queues, self.name)
            return [item.message for item in islice(items, limit)]

    def find(self, task_id: str) -> MessageSnapshot | None:
        """Find a task in this queue; None when it is not here, or has finished. Reads the queue in chunks."""
        check_text("task_id", task_id)
        with self._queues() as queues:
            item = find_item(queues, self.name, task_id)
            return None if item is None else item.message

    def cancel(self, task_id: str) -> Cancellation:
        """Cancel a task: remove its message.

        No worker learns of it: the result of the task stays ``PENDING``. A task that is not published yet
        cannot be cancelled here.

        Returns:
            ``waiting`` or ``delayed``: that was its state, and it will not run. ``claimed``: a worker has
            it, where ``app.control.revoke`` reaches it. ``none``: it does not wait in this queue.
        """
        check_text("task_id", task_id)
        with self._queues() as queues:
            for _ in range(_ATTEMPTS):
                item = find_item(queues, self.name, task_id)
                if item is None or item.message.state == "dead":
                    return "none"
                if self._removed(queues, item):
                    return "delayed" if item.message.state == "delayed" else "waiting"
                if item.message.state == "claimed":
                    break
            return "claimed"

    def cancel_task_name(
        self, name: str, *, dry_run: bool = False, on_progress: OnProgress = ignore_progress
    ) -> int:
        """Cancel all waiting and delayed calls of one task name, and return their number.

        Args:
            name: The name of the task.
            dry_run: Whether to count the messages only.
            on_progress: Called after each message with the number of cancelled messages.
        """
        check_text("name", name)
        with self._queues() as queues:
            items: Iterable[StoredItem] = chain(
                ready_items(queues, self.name), delayed_items(queues, self.name)
            )
            found = [item for item in items if item.message.task == name]
            if dry_run:
                return len(found)
            count = 0
            for item in found:
                count += self._removed(queues, item)
                on_progress(count)
            return count

    def purge(self, *, dry_run: bool = False, on_progress: OnProgress = ignore_progress) -> int:
        """Remove all waiting and delayed messages, and return their number.

        Messages that workers have stay. The result backend is not informed: the removed tasks stay
        ``PENDING`` there.

        Args:
            dry_run: Whether to count the messages only.
            on_progress: Called at the end with the number of removed messages.
        """
        if dry_run:
            return self.depth
        with self._queues() as queues:
            count = queues.purge(self.name)
            on_progress(count)
            return count

    @contextmanager
    def _queues(self) -> Iterator[ZooKeeperQueues]:
        with self._broker.zookeeper_channel() as channel:
            yield channel.stored_queues

    def _removed(self, queues: ZooKeeperQueues, item: StoredItem) -> bool:
        """Remove a message, unless a consumer has it or it has moved."""
        nodes = queues.nodes(self.name)
        if item.message.state == "delayed":
            steps: list[Step] = [delete(f"{nodes.delayed}/{item.name}")]
        else:
            # The transaction is refused if a consumer holds the lock.
            lock, path = nodes.lock(item.name), nodes.item(item.name)
            steps = [create(lock), delete(path), delete(lock)]
        try:
            transact(queues.session, steps, ANSWER_S)
        except TransactionRefused:
            return False
        queues.remove([nodes.suspect(item.name)])
        return True
