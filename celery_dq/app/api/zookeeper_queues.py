"""``app.dq.queues`` and ``app.dq.dead_letters`` on the ZooKeeper broker.

The name of a node holds no task id, so a search reads the messages of the queue, in chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from itertools import chain, islice
from typing import Any, NamedTuple

from kazoo.exceptions import KazooException, NoAuthError, NoNodeError

from celery_dq.app.api.audit import OnProgress, ignore_progress
from celery_dq.app.api.message_edits import check_changes, shown_arguments, with_arguments
from celery_dq.app.api.queues import QueueApi
from celery_dq.app.api.redis_dead_letters import ALL, DeadLetters, check_replay, paced, unreadable
from celery_dq.curator.framing import frame, unframe
from celery_dq.errors import CorruptRecord, InvalidMessage, InvalidRequest
from celery_dq.inspector.dead_letters import DeadLetter, DeadLetterContent, DeadLetterFilter
from celery_dq.inspector.messages import UNREADABLE, MessageDetails, MessageSnapshot
from celery_dq.inspector.queues import ZooKeeperQueueSnapshot
from celery_dq.inspector.redis_values import check_count, check_text, moment
from celery_dq.transport import envelope
from celery_dq.transport.message_record import expires_us
from celery_dq.transport.redis.store.partition import Cancellation
from celery_dq.transport.tenant import check_priority
from celery_dq.transport.zookeeper.dead_letters import DeadLetterNode
from celery_dq.transport.zookeeper.queues import ANSWER_S, ZooKeeperQueues
from celery_dq.transport.zookeeper.record import ZooKeeperRecord, count_of
from celery_dq.znodes import due_ms_of, served_in_order
from celery_dq.zookeeper.multi_read import read_all
from celery_dq.zookeeper.transaction import (
    Step,
    TransactionRefused,
    ask_all,
    create,
    delete,
    failure_of,
    transact,
)

#: Messages that are read together; each has up to 1 MB.
CHUNK = 100


class StoredItem(NamedTuple):
    """A stored message.

    Attributes:
        name: Name of its node.
        message: Its snapshot.
    """

    name: str
    message: MessageSnapshot


def queue_counts(queues: ZooKeeperQueues, queue: str) -> ZooKeeperQueueSnapshot:
    """Read the counts of a queue in one round trip."""
    nodes = queues.nodes(queue)
    folders = (nodes.ready, nodes.locks, nodes.delayed, nodes.dead, nodes.suspects, nodes.unreadable)
    stats = ask_all(queues.session, lambda client: [client.exists_async(path) for path in folders], ANSWER_S)
    for path, stat in zip(folders, stats, strict=True):
        if isinstance(stat, KazooException):
            raise failure_of("read", path, stat)
    ready, locks, delayed, dead, suspects, unreadable = (
        0 if stat is None else int(stat.numChildren) for stat in stats
    )
    return ZooKeeperQueueSnapshot(queue, max(ready - locks, 0), delayed, locks, dead, suspects, unreadable)


def ready_items(queues: ZooKeeperQueues, queue: str, *, claimed: bool = False) -> Iterator[StoredItem]:
    """Yield the waiting messages in the order of their service; with `claimed`, those in flight, too."""
    nodes = queues.nodes(queue)
    # The locks are read first: a message that is taken and finished in between has no node any more.
    locked = set(queues.children(nodes.locks))
    names = served_in_order(queues.children(nodes.ready))
    wanted = names if claimed else [name for name in names if name not in locked]
    for name, answer in _read(queues, nodes.ready, wanted):
        yield _item(queue, name, "claimed" if name in locked else "waiting", answer)


def delayed_items(queues: ZooKeeperQueues, queue: str) -> Iterator[StoredItem]:
    """Yield the messages that wait for their ETA, the earliest first."""
    nodes = queues.nodes(queue)
    due = {}
    for name in queues.children(nodes.delayed):
        with suppress(ValueError, IndexError):  # the node of another program
            due[name] = due_ms_of(name)
    for name, answer in _read(queues, nodes.delayed, sorted(due, key=lambda name: (due[name], name))):
        item = _item(queue, name, "delayed", answer)
        yield item._replace(message=replace(item.message, due=moment(due[name] * 1000)))


def find_item(queues: ZooKeeperQueues, queue: str, task_id: str) -> StoredItem | None:
    """Return the message of a task; None when it is not in the queue. Reads the queue in chunks."""
    nodes = queues.nodes(queue)
    for items in (ready_items(queues, queue, claimed=True), delayed_items(queues, queue)):
        for item in items:
            if item.message.id == task_id:
                return item
    path = nodes.dead_letter(task_id)
    folder, _, name = path.rpartition("/")
    for found, (data, stat) in _read(queues, folder, [name]):
        # A dead letter holds the message, and a description of its end.
        with suppress(CorruptRecord):
            data = frame(list(unframe(data))[:1])
        item = _item(queue, found, "dead", (data, stat))
        return item._replace(message=replace(item.message, id=task_id, task_id=task_id))
    return None


def _read(
    queues: ZooKeeperQueues, folder: str, names: Sequence[str]
) -> Iterator[tuple[str, tuple[bytes, Any]]]:
    """Yield name, data and stat of the nodes that still exist. A node that an ACL hides has no stat."""
    for start in range(0, len(names), CHUNK):
        chunk = names[start : start + CHUNK]
        answers = read_all(queues.session, [f"{folder}/{name}" for name in chunk], ANSWER_S)
        for name, answer in zip(chunk, answers, strict=True):
            if isinstance(answer, NoNodeError):
                continue
            if isinstance(answer, NoAuthError):
                yield name, (b"", None)
            elif isinstance(answer, KazooException):
                raise failure_of("read", f"{folder}/{name}", answer)
            else:
                yield name, answer


def _item(queue: str, name: str, state: str, answer: tuple[bytes, Any]) -> StoredItem:
    data, stat = answer
    message = MessageSnapshot(name, name, queue, state)
    if stat is None:
        return StoredItem(name, replace(message, args="denied by its ACL"))
    try:
        record = ZooKeeperRecord.unpack(data)
        headers: dict[str, Any] = envelope.unpack(record.envelope)[0]
    except CorruptRecord as exc:
        return StoredItem(name, replace(message, args=f"{UNREADABLE}: {exc}"))
    count = count_of(stat)
    # A message that no consumer has was lost by every consumer that took it and did not requeue it.
    lost = count.deliveries if state == "claimed" else max(count.taken - stat.version, 0)
    task_id = str(headers.get("id") or name)
    message = replace(
        message,
        id=task_id,
        task_id=task_id,
        task=str(headers.get("task") or ""),
        priority=record.priority,
        due=moment(record.due_ms * 1000),
        expires=_expiry(headers.get("expires")),
        args=str(headers.get("argsrepr") or ""),
        kwargs=str(headers.get("kwargsrepr") or ""),
        deliveries=0 if state == "dead" else lost,
    )
    return StoredItem(name, message)


def _expiry(value: Any) -> datetime | None:
    """Return the header ``expires`` as every broker reads it; None for none, or one that is not a time."""
    with suppress(InvalidMessage):
        return moment(expires_us(value, None, 0))
    return None


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

    def details(self, task_id: str) -> MessageDetails | None:
        """A task in this queue; None when it is not here, or has finished. Its headers are not read."""
        found = self.find(task_id)
        return None if found is None else MessageDetails(found)

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
        """See :meth:`QueueApi.cancel_task_name`. Progress is reported after each message."""
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
        """See :meth:`QueueApi.purge`. Progress is reported at the end."""
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


class ZooKeeperDeadLettersApi(DeadLetters):
    """The dead letters of one queue in ZooKeeper."""

    def __len__(self) -> int:
        with self._broker.zookeeper_channel() as channel:
            return len(channel.dead_letters(self.name))

    def list(self, limit: int = 100, offset: int = 0) -> list[DeadLetter]:
        """See :meth:`DeadLetters.list`."""
        check_count("limit", limit)
        check_count("offset", offset, least=0)
        with self._broker.zookeeper_channel() as channel:
            found = channel.dead_letters(self.name).list()
        return [self._letter(each) for each in found[offset : offset + limit]]

    def check_tenant_filter(self, tenant: str | None) -> None:
        """Refuse to look for the dead letters of a tenant."""
        if tenant is not None:
            raise InvalidRequest(
                f"tenant = {tenant!r}: a dead letter in ZooKeeper has no tenant; leave out tenant"
            )

    def replay(
        self,
        message_id: str | None = None,
        *,
        wanted: DeadLetterFilter = ALL,
        rate: str | float | None = None,
        dry_run: bool = False,
        on_progress: OnProgress = ignore_progress,
    ) -> int:
        """Send one dead letter, or all of them, to the end of the queue.

        See :meth:`DeadLetters.replay`. Unreadable dead letters are not replayed.

        Raises:
            InvalidMessage: The dead letter `message_id` cannot be read.
            InvalidRequest: Both `message_id` and `wanted` are given, or `wanted` names a tenant.
        """
        per_second = check_replay(message_id, wanted, rate)
        self.check_tenant_filter(wanted.tenant)
        with self._broker.zookeeper_channel() as channel:
            stored = channel.dead_letters(self.name)
            if message_id is not None:
                if dry_run:
                    return int(stored.find(message_id) is not None)
                try:
                    return int(stored.replay(message_id))
                except CorruptRecord as exc:
                    raise unreadable(self.name, message_id) from exc
            # Oldest first. The list is made before, so that a message that dies again is not replayed twice.
            letters = [
                letter
                for letter in reversed(stored.list())
                if letter.record is not None and wanted.matches(self._letter(letter))
            ]
            if dry_run:
                return len(letters)
            count = 0
            for letter in paced(letters, per_second):
                count += stored.replay(letter.id)
                on_progress(count)
            return count

    def show(self, message_id: str) -> DeadLetterContent | None:
        """See :meth:`DeadLetters.show`. An expiry is not known."""
        check_text("message_id", message_id)
        with self._broker.zookeeper_channel() as channel:
            node = channel.dead_letters(self.name).find(message_id)
        if node is None:
            return None
        letter, record = self._letter(node), node.record
        if record is None:
            return DeadLetterContent(letter, 0, None, None, None, None)
        args, kwargs = shown_arguments(record.envelope, record.body)
        return DeadLetterContent(letter, record.priority, moment(record.due_ms * 1000), None, args, kwargs)

    def edit(self, message_id: str, **changes: Any) -> str | None:
        """See :meth:`DeadLetters.edit`. The changes are ``args``, ``kwargs`` and ``priority``."""
        check_text("message_id", message_id)
        check_changes(changes, ("args", "kwargs", "priority"))

        def changed(record: ZooKeeperRecord) -> ZooKeeperRecord:
            if "priority" in changes:
                record = replace(record, priority=check_priority(changes["priority"]))
            accept, tasks = self._broker.accept_content, self._broker.app.tasks
            packed, body = with_arguments(record.envelope, record.body, changes, accept, tasks)
            return replace(record, envelope=packed, body=body)

        with self._broker.zookeeper_channel() as channel:
            return message_id if channel.dead_letters(self.name).replay(message_id, changed) else None

    def purge(
        self,
        message_id: str | None = None,
        *,
        dry_run: bool = False,
        on_progress: OnProgress = ignore_progress,
    ) -> int:
        """See :meth:`DeadLetters.purge`. Progress is reported at the end."""
        if message_id is not None:
            check_text("message_id", message_id)
        with self._broker.zookeeper_channel() as channel:
            stored = channel.dead_letters(self.name)
            if dry_run:
                return len(stored) if message_id is None else int(stored.find(message_id) is not None)
            count = int(stored.purge(None if message_id is None else [message_id]))
            on_progress(count)
            return count

    def recover(self, *, dry_run: bool = False, on_progress: OnProgress = ignore_progress) -> int:
        """Refuse: in ZooKeeper, a message is one node, which needs nothing else to be named.

        Raises:
            InvalidRequest: Always.
        """
        raise InvalidRequest(
            f"The queue {self.name!r} is in ZooKeeper, where each message is a node of its own: there is "
            "nothing to recover. A node that cannot be read is kept in the folder 'unreadable' of the queue."
        )

    def _letter(self, node: DeadLetterNode) -> DeadLetter:
        headers: dict[str, Any] = {}
        args = ""
        try:
            if node.record is not None:
                headers = envelope.unpack(node.record.envelope)[0]
        except CorruptRecord as error:
            args = f"{UNREADABLE}: {error}"
        return DeadLetter(
            id=node.id,
            task_id=str(headers.get("id") or node.id),
            queue=self.name,
            reason=str(node.about.get("reason", "unknown")),
            worker=str(node.about.get("worker", "")),
            at=moment(node.at_us),
            deliveries=int(node.about.get("deliveries", 0)),
            task=str(headers.get("task") or node.about.get("task", "")),
            args=args or str(headers.get("argsrepr") or ""),
            kwargs=str(headers.get("kwargsrepr") or ""),
        )
